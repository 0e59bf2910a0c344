"""What goes wrong is an error on the ranks it reaches: no wrong numbers, no hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from longdelta.distributed import CPContext, build_cp_context
from longdelta.errors import InvalidInput
from longdelta.plan.partition import partition
from longdelta.testing.ranks import Failure, RankPool

from .rank_faults import (
    after_destruction,
    build,
    copies,
    dies,
    elsewhere,
    let_go,
    other_rows,
    two_calls,
    two_plans,
)

SECONDS = 5.0
"""Of a message that never comes; the error may take that long, and a little more to be told."""
PATIENCE = 40.0
"""Of a message where the error must come without waiting for it, on a busy machine too."""


def at_once(pool: RankPool, ranks: int, function: Any, *args: Any) -> list[Any]:
    """Outcomes that wait for no message."""
    started = time.monotonic()
    found = pool.outcomes(ranks, function, *args, message_seconds=PATIENCE)
    assert time.monotonic() - started < PATIENCE
    return found


def in_time(pool: RankPool, ranks: int, function: Any, *args: Any) -> list[Any]:
    """Outcomes that may wait for one message each."""
    started = time.monotonic()
    found = pool.outcomes(ranks, function, *args, message_seconds=SECONDS)
    assert time.monotonic() - started < 3 * SECONDS + 10
    return found


def test_context_of_two_ranks_needs_a_group() -> None:
    held = partition([0, 64], 2)
    with pytest.raises(InvalidInput, match=r"group of 2 ranks .*here it is rank 0 of 1"):
        CPContext(held, None, torch.device("cpu"), None)
    with pytest.raises(InvalidInput, match=r"one list per rank \(1\), got 2"):
        build_cp_context([0, 64], layout="fragments", fragments=[[(0, 0, 32)], [(0, 32, 32)]])


DIFFERENCES: dict[str, dict[str, Any]] = {
    "cu_seqlens": {"cu_seqlens": [0, 601, 1024]},
    "layout": {"layout": "zigzag"},
    "align": {"align": "segment"},
    "num_v_heads": {"num_v_heads": 4},
    "rows": {"rows": 1030},
    "conv1d_kernel_size": {"conv1d_kernel_size": 4},
}


@pytest.mark.parametrize("difference", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_context_refuses_different_arguments_on_every_rank(
    pool: RankPool, difference: dict[str, Any]
) -> None:
    found = at_once(pool, 3, build, [{}, difference, {}])
    assert [x.kind for x in found] == ["InvalidInput"] * 3
    others = ["[1]", "[0, 2]", "[1]"]
    for rank, (failure, ranks) in enumerate(zip(found, others, strict=True)):
        assert f"ranks {ranks} have others than rank {rank}" in failure.message


WRONG: dict[str, dict[str, Any]] = {
    "decreasing": {"cu_seqlens": [0, 7, 3]},
    "no_list": {"cu_seqlens": None},
    "fractions": {"cu_seqlens": torch.tensor([0.0, 1024.0])},
    "layout": {"layout": "spiral"},
    "layout_of_another_type": {"layout": ["zigzag"]},
    "rows": {"rows": "many"},
    "fragments": {"layout": "fragments", "fragments": 3},
    "kernel_size": {"conv1d_kernel_size": "four"},
    "device": {"device": "abacus"},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_context_refuses_a_wrong_argument_of_one_rank_on_every_rank(
    pool: RankPool, wrong: dict[str, Any]
) -> None:
    found = at_once(pool, 2, build, [{}, wrong])
    assert [x.kind for x in found] == ["InvalidInput"] * 2
    assert "same arguments on every rank; ranks [1]" in found[0].message
    assert "same arguments on every rank" not in found[1].message


def test_op_with_contexts_of_two_plans_ends_with_an_error_on_both_ranks(pool: RankPool) -> None:
    assert all(torch.is_tensor(x) for x in at_once(pool, 2, two_plans, [0, 0]))
    found = in_time(pool, 2, two_plans, [0, 1])
    assert all(isinstance(x, Failure) for x in found), found
    assert {x.kind for x in found} <= {"RuntimeError", "DistBackendError"}


def test_ranks_that_call_different_operations_end_with_an_error(pool: RankPool) -> None:
    found = in_time(pool, 2, two_calls)
    assert all(isinstance(x, Failure) for x in found), found


def test_op_with_rows_of_another_plan_names_them(pool: RankPool) -> None:
    found = in_time(pool, 2, other_rows)
    assert found[1].kind == "InvalidInput"
    assert "q must be [1, 512, H, K]: rank 1 of this cp_context holds 512 rows" in found[1].message
    assert isinstance(found[0], Failure)


@pytest.mark.parametrize("what", ["op", "backward", "conv", "unshard"])
def test_context_of_a_destroyed_group_is_an_error(pool: RankPool, what: str) -> None:
    for failure in at_once(pool, 2, after_destruction, what):
        assert failure.kind == "InvalidInput"
        assert "Was it destroyed? Build the context again with a live group" in failure.message


def test_context_lives_as_long_as_a_backward_needs_it_and_no_longer(pool: RankPool) -> None:
    assert at_once(pool, 2, let_go) == [(True, True, True)] * 2


def test_context_refuses_to_be_copied_or_sent_to_another_process(pool: RankPool) -> None:
    for rank, said in enumerate(at_once(pool, 2, copies)):
        assert len(said) == 3
        for message in said:
            assert f"belongs to rank {rank} of its group and cannot be copied" in message


def test_context_refuses_a_group_without_this_process(pool: RankPool) -> None:
    # All processes of the default group make a group together.
    found = at_once(pool, 4, elsewhere)
    assert found[1] is None
    for failure in (found[0], found[2], found[3]):
        assert failure.kind == "InvalidInput"
        assert "group must contain this process" in failure.message


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_rank_that_dies_ends_the_others_with_an_error(when: str) -> None:
    with RankPool(3, message_seconds=SECONDS) as own:
        own.run(3, build, [{}, {}, {}])
        started = time.monotonic()
        found = own.outcomes(3, dies, when)
        assert time.monotonic() - started < 3 * SECONDS + 10
    assert found[1] == Failure("Died", "exit code 3")
    # The document lies on all three: states of both others pass through rank 1.
    assert all(isinstance(x, Failure) for x in found)
