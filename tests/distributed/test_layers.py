"""causal_conv1d and GatedDeltaNet on many ranks equal one device, forward and gradients."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from longdelta.distributed import build_cp_context
from longdelta.errors import InvalidInput
from longdelta.nn import causal_conv1d
from longdelta.plan.cost import halo_collectives
from longdelta.plan.partition import Partition, partition
from longdelta.testing.budgets import EAGER, assert_within
from longdelta.testing.ranks import RankPool

from .rank_layers import (
    Conv,
    ConvProblem,
    conv,
    conv_problem,
    convolved,
    layer,
    layer_problem,
    mixed,
)

LAYOUTS = ["contiguous", "zigzag", "zigzag_per_document", "balanced"]
# Where other libraries read out of bounds, and cuts into pieces of a token or two.
PACKINGS = {
    "edge_within_a_document": [513, 511],
    "edge_near_a_document": [514, 510],
    "one_token_at_the_edge": [512, 1, 511],
    "edges_within_the_taps": [257, 253, 257, 257],
    "tiny_pieces": [5, 0, 1, 2],
    "a_token_a_rank": [4],
}


def bounds_of(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def rows_together(plan: Partition, parts: list[Tensor]) -> Tensor:
    full = torch.full_like(parts[0][:, :1].expand(1, plan.rows, -1), float("nan")).clone()
    for rank, part in enumerate(parts):
        rows = [row for start, stop in plan.rows_of(rank) for row in range(start, stop)]
        full[:, rows] = part
    return full


def states_together(owners: list[tuple[int, ...]], parts: list[Tensor]) -> Tensor:
    """Rows of all documents; each must have exactly one owner."""
    documents = sum(map(len, owners))
    assert sorted(document for held in owners for document in held) == list(range(documents))
    full = parts[0].new_full((documents, *parts[0].shape[1:]), float("nan"))
    for held, part in zip(owners, parts, strict=True):
        full[list(held)] = part
    return full


def conv_together(plan: Partition, parts: list[Conv]) -> Conv:
    """Gradients of weight and bias: their sum over ranks in float64."""
    starts = [plan.starts(rank) for rank in range(plan.ranks)]
    ends = [plan.ends(rank) for rank in range(plan.ranks)]
    d_initial = [part.d_initial_state for part in parts if part.d_initial_state is not None]
    return Conv(
        rows_together(plan, [part.y for part in parts]),
        states_together(ends, [part.final_state for part in parts]),
        rows_together(plan, [part.dx for part in parts]),
        torch.stack([part.dweight for part in parts]).double().sum(0),
        torch.stack([part.dbias for part in parts]).double().sum(0),
        states_together(starts, d_initial) if d_initial else None,
    )


def compare_conv(
    pool: RankPool,
    ranks: int,
    lengths: list[int],
    W: int,
    dtype: torch.dtype = torch.float64,
    *,
    initial: bool = False,
    layout: str = "contiguous",
) -> None:
    """Values and gradients against one device in float64; bytes against the plan; and, without the
    activation, whose bits depend on a row's place in memory, one device's bits of y and states."""
    bounds = bounds_of(lengths)
    cu_seqlens = torch.tensor(bounds)
    problem = conv_problem(bounds, W, dtype, initial=initial)
    exact = convolved(wide(problem), cu_seqlens=cu_seqlens, activation="silu")
    same = convolved(problem, cu_seqlens=cu_seqlens, activation=None)
    plan = partition(bounds, ranks, layout, rows=bounds[-1] + 2)
    answers = pool.run(ranks, conv, bounds, problem, layout)
    together = conv_together(plan, [found for found, _, _ in answers])
    for name, out, ref in zip(Conv._fields, together, exact, strict=True):
        if ref is not None:
            # A sum over ranks may vanish beside its terms.
            terms = [getattr(found, name) for found, _, _ in answers]
            scale = torch.stack(terms) if name in ("dweight", "dbias") else None
            assert_within(name, out, ref, EAGER[dtype], scale)
    plain = conv_together(plan, [found for _, found, _ in answers])
    for name in ("y", "final_state", "d_initial_state"):
        if getattr(same, name) is not None:
            assert torch.equal(getattr(plain, name), getattr(same, name)), (name, str(plan))
    for rank, (_, _, log) in enumerate(answers):
        wanted = halo_collectives(plan, rank, W, 3, str(dtype).removeprefix("torch."))
        assert [(x.name, x.sent, x.received) for x in log] == [
            (c.name, c.sent, c.received) for direction in wanted for c in direction
        ]


def wide(problem: ConvProblem) -> ConvProblem:
    """The same values in float64."""
    return ConvProblem(*(None if x is None else x.double() for x in problem))


@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS.keys())
@pytest.mark.parametrize("ranks", [2, 4])
def test_conv_on_ranks_equals_one_device_for_every_packing_and_layout(
    pool: RankPool, ranks: int, lengths: list[int]
) -> None:
    for layout in LAYOUTS:
        compare_conv(pool, ranks, lengths, 4, layout=layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conv_on_ranks_equals_one_device_in_every_dtype(pool: RankPool, dtype: torch.dtype) -> None:
    compare_conv(pool, 3, [37, 51, 1, 40], 4, dtype, layout="zigzag")


@pytest.mark.parametrize("W", [1, 2, 9])  # no halo; one row; longer than any fragment
def test_conv_halo_comes_from_as_many_ranks_as_hold_it(pool: RankPool, W: int) -> None:
    compare_conv(pool, 4, [11], W, layout="contiguous")
    compare_conv(pool, 4, [11, 3], W, layout="zigzag")


def test_conv_on_ranks_takes_and_returns_states_where_documents_start_and_end(
    pool: RankPool,
) -> None:
    for layout in LAYOUTS:
        compare_conv(pool, 3, [44, 0, 33, 50], 4, layout=layout, initial=True)


def test_conv_refuses_a_state_that_would_have_to_cross_a_rank_border(pool: RankPool) -> None:
    bounds = [0, 4]
    problem = conv_problem(bounds, 4)
    for failure in pool.outcomes(2, conv, bounds, problem, "contiguous", message_seconds=40):
        assert failure.kind == "NotYet"
        assert "initial_state: document 0 is cut at its token 2" in failure.message


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_layer_on_ranks_equals_one_device(pool: RankPool, ranks: int, layout: str) -> None:
    bounds = bounds_of([600, 0, 70, 31])
    build: dict[str, Any] = {"layout": layout, "conv1d_kernel_size": 4}
    single = mixed(*layer_problem(bounds), cu_seqlens=torch.tensor(bounds))
    parts = pool.run(ranks, layer, bounds, build)
    plan = partition(bounds, ranks, layout, rows=bounds[-1] + 2)
    owners = {"conv_state": plan.ends, "S": plan.ends, "d_conv": plan.starts, "d_S": plan.starts}
    for name in single._fields[:-1]:
        pieces = [getattr(part, name) for part in parts]
        if name in owners:
            held = [owners[name](rank) for rank in range(ranks)]
            out = states_together(held, pieces)
        else:
            out = rows_together(plan, pieces)
        assert_within(name, out, getattr(single, name), EAGER[torch.float64])
    for name, ref in single.parameters.items():
        out = torch.stack([part.parameters[name] for part in parts]).sum(0)
        assert_within(name, out, ref, EAGER[ref.dtype])


def test_conv_names_the_rows_and_the_kernel_size_that_a_context_serves() -> None:
    context = build_cp_context([0, 5], conv1d_kernel_size=3)
    x, weight = torch.zeros(1, 5, 2), torch.zeros(2, 4)
    with pytest.raises(InvalidInput, match="conv1d_kernel_size=3; the convolution has 4"):
        causal_conv1d(x, weight, cp_context=context)
    with pytest.raises(InvalidInput, match=r"x must be \[1, 5, D\].*see cp_context.shard"):
        causal_conv1d(x[:, 1:], weight[:, :2], cp_context=context)
