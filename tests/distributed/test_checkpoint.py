"""Recomputation: the same gradients, and what is sent is counted."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from longdelta.distributed import RecomputeHandle
from longdelta.testing.ranks import RankPool

from .rank_recompute import WORK, Run, checkpointed, op_argument
from .whole import plan_of

RANKS = 3


@lru_cache(maxsize=4)
def plainly(pool: RankPool, layers: int, deterministic: bool) -> list[Run]:
    runs: list[Run] = pool.run(RANKS, checkpointed, "not at all", layers, deterministic)
    return runs


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("how", ["ours", "ours reentrant", "explicit", "torch", "torch reentrant"])
def test_checkpoint_keeps_the_bits_and_counts_of_exchanges(
    pool: RankPool, how: str, deterministic: bool
) -> None:
    expected = plainly(pool, 2, deterministic)
    for run, plain in zip(
        pool.run(RANKS, checkpointed, how, 2, deterministic), expected, strict=True
    ):
        assert len(run.gradients) == 7
        for got, wanted in zip(run.gradients, plain.gradients, strict=True):
            assert torch.equal(got, wanted)
        there = plain.exchanged[: len(plain.exchanged) // 2]
        assert set(there) == {"halo", "relay" if deterministic else "summaries"}
        # Torch's own recomputation repeats the forward's messages, ours and a handle's nothing.
        more = there if how.startswith("torch") else []
        assert sorted(run.exchanged) == sorted(plain.exchanged + more)


def test_recompute_handle_holds_the_states_at_borders_and_no_activations(
    pool: RankPool,
) -> None:
    plan = plan_of(WORK, RANKS, layout="zigzag", align="segment", num_v_heads=WORK.HV)
    for rank, run in enumerate(pool.run(RANKS, checkpointed, "explicit", 1, True)):
        states = 8 * 8 * WORK.HV * 4
        halo = 3 * sum(piece.offset > 0 for piece in plan.fragments[rank])
        most = 2 * 8 * len(plan.fragments[rank]) * states
        assert 0 < run.held_bytes - halo * WORK.HV * 8 * 4 <= most


def test_recompute_handle_sends_once_for_its_forward_and_its_recomputation(
    pool: RankPool,
) -> None:
    assert pool.run(2, op_argument, 2, False) == [[1, 0], [1, 0]]
    assert pool.run(2, op_argument, 3, True) == [[1, 1, 1], [1, 1, 1]]


def test_recompute_handle_refuses_a_second_forward(pool: RankPool) -> None:
    for failure in pool.outcomes(2, op_argument, 3, False, message_seconds=40):
        assert failure.kind == "RuntimeError"
        assert "served its forward and its recomputation; make a new one" in failure.message


def test_recompute_handle_on_one_device_gives_back_what_it_computed() -> None:
    handle = RecomputeHandle()
    calls: list[int] = []

    def exchange() -> torch.Tensor:
        calls.append(1)
        return handle.once(lambda: (torch.full((2,), float(len(calls))),), "plan")[0]

    first, again = handle.run(exchange), handle.run(exchange)
    assert torch.equal(first, torch.ones(2))
    assert torch.equal(again, first)
    assert handle.nbytes == 8
    handle.clear()
    assert handle.nbytes == 0
    assert torch.equal(handle.run(exchange), torch.full((2,), 3.0))
