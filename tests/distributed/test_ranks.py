"""The pool: errors name the rank, nothing hangs, and the next run finds live processes."""

from __future__ import annotations

import time

import pytest

from longdelta.testing.ranks import Failure, RankError, RankPool

from .rank_faults import dies, fails_on, sleeps


def test_pool_returns_results_by_rank_and_names_the_rank_that_fails() -> None:
    with RankPool(2) as own:
        assert own.run(2, sleeps, 0.0) == [0, 1]
        with pytest.raises(RankError, match=r"(?s)rank 1 of 2: KeyError: 'no such thing'\nTrace"):
            own.run(2, fails_on, 1)
        # New processes.
        assert own.run(1, sleeps, 0.0) == [0]
        assert own.run(2, sleeps, 0.0) == [0, 1]
        own.seconds = 4.0
        started = time.monotonic()
        assert own.outcomes(2, sleeps, 600.0) == [Failure("Hung", "no answer after 4.0 s"), 1]
        assert time.monotonic() - started < 60
        own.seconds = 120.0
        with pytest.raises(RankError, match="rank 1 of 2: Died: exit code 3"):
            own.run(2, dies, "forward")


def test_pool_refuses_more_ranks_than_it_has() -> None:
    with pytest.raises(ValueError, match=r"ranks must be in \[1, 2\], got 3"):
        RankPool(2).run(3, sleeps, 0.0)
