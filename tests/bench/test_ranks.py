"""Several ranks: every arm shards its own way, and all give the same whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longdelta.bench.results import Record
from longdelta.testing.budgets import EAGER
from longdelta.testing.ranks import RankPool

from .rank_bench import OURS, PEERS, contest

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as found:
        yield found


def check(records: list[Record]) -> None:
    """Timed in every group, right, and equal in bits from call to call."""
    for record in records:
        assert record.note == "", record.arm
        assert record.groups_ms == ((0.0,) * 3 if record.op == "bwd" else (1.0,) * 3)
        assert record.bits == ("" if record.op == "bwd" else "equal")
        for listed in (record.errors_float64, record.errors_ours):
            errors = [float(part.split()[1]) for part in listed.split(", ") if part]
            assert all(error < EAGER[torch.float32] for error in errors), (record.arm, listed)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag_per_document"])
def test_our_arms_agree_with_float64_on_an_odd_number_of_tokens(
    pool: RankPool, tmp_path: Path, layout: str
) -> None:
    records = pool.run(2, contest, str(tmp_path), layout, OURS, 131)[0]
    assert {r.arm for r in records} == set(OURS)
    check(records)
    assert len(list(tmp_path.glob("*.csv"))) == 1


def test_adapters_of_peers_shard_call_and_join_as_the_peers_take_it(
    pool: RankPool, tmp_path: Path
) -> None:
    records = pool.run(2, contest, str(tmp_path), "zigzag", ("ours", *PEERS), 132)[0]
    assert {r.arm for r in records} == {"ours", *PEERS}
    check(records)


def test_peers_that_need_divisible_tokens_say_so_in_their_cells(
    pool: RankPool, tmp_path: Path
) -> None:
    records = pool.run(2, contest, str(tmp_path), "contiguous", ("ours", *PEERS), 131)[0]
    notes = {r.arm: r.note for r in records}
    assert "needs tokens that the ranks divide: 131 on 2" in notes["fla_kcp"]
    assert "needs tokens that the ranks divide: 131 on 2" in notes["flash_qla_cp"]
    check([r for r in records if r.arm not in ("fla_kcp", "flash_qla_cp")])
