"""The protocol's arithmetic: the order of arms, medians, ratios, and what is marked."""

from __future__ import annotations

import weakref

import torch

from longdelta.bench.problem import Place
from longdelta.bench.timing import (
    FULL,
    QUICK,
    DeviceTimer,
    Slot,
    palindromes,
    ratio,
    spread,
)


def test_group_runs_the_arms_as_two_palindromes() -> None:
    assert palindromes("ABC", 2) == tuple("ABCCBAABCCBA")
    assert palindromes("ABC", 2, reverse=True) == tuple("CBAABCCBAABC")


def test_ratio_is_the_median_of_the_groups_with_its_extremes() -> None:
    found = ratio([2.0, 3.0, 8.0], [1.0, 2.0, 2.0])
    assert found == (2.0, 1.5, 4.0)
    assert str(found) == "2.000 [1.500, 4.000] UNSTABLE"


def test_ratio_pairs_groups_and_leaves_out_the_unpaired() -> None:
    assert ratio([2.0, 9.0], [1.0]) == (2.0, 2.0, 2.0)
    assert ratio([], [1.0]) is None


def test_spread_marks_what_moves_by_more_than_one_percent() -> None:
    calm, wild = ratio([1.0, 1.009], [1.0, 1.0]), ratio([1.0, 1.02], [1.0, 1.0])
    assert calm is not None
    assert wild is not None
    assert (calm.unstable, wild.unstable) == (False, True)
    assert spread([100.0, 101.0, 99.0]) == 0.02


def test_full_schedule_is_the_seeds_protocol() -> None:
    assert (FULL.groups, FULL.rounds, FULL.warmup, FULL.timed) == (5, 2, 10, 12)
    assert FULL.flush_bytes == 256 * 2**20
    assert FULL.iterations(100.0) == (10, 12)


def test_quick_schedule_calls_a_slow_arm_less_often() -> None:
    assert QUICK.groups < FULL.groups
    assert QUICK.iterations(1e-4) == (10, 12)
    assert QUICK.iterations(0.04) == (2, 5)
    assert QUICK.iterations(60.0) == (1, 3)


def test_quick_schedule_leaves_out_what_is_too_slow_and_says_so() -> None:
    assert QUICK.too_slow(0.2) == FULL.too_slow(100.0) == ""
    assert QUICK.too_slow(1.25).startswith("one call takes 1.2 s: not timed above 0.25 s")


def test_timer_holds_one_result_at_a_time() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def call() -> torch.Tensor:
        assert all(each() is None for each in held)
        result = torch.zeros(4)
        held.append(weakref.ref(result))
        return result

    result, _ = DeviceTimer(Place(torch.device("cpu")), 16).measure(
        call, Slot("", "", "", "", 0), 2, 3
    )
    assert result is held[-1]()


def test_timer_runs_warmup_and_timed_iterations_and_returns_the_last_result() -> None:
    timer, calls = DeviceTimer(Place(torch.device("cpu")), 16), []

    def call() -> int:
        calls.append(None)
        return len(calls)

    result, ms = timer.measure(call, Slot("", "", "", "", 0), 2, 3)
    assert (result, len(calls)) == (5, 5)
    assert ms > 0
