"""One pool of processes for all tests of this folder."""

from collections.abc import Iterator

import pytest

from longdelta.testing.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks on gloo, started when first used."""
    with RankPool(4) as ranks:
        yield ranks
