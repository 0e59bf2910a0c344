"""What a rank does in the tests of shard, unshard and convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longdelta.distributed import build_cp_context
from longdelta.distributed.collectives import Group, recording
from longdelta.errors import InvalidInput

BATCH = [0, 9, 9, 10, 23]
ROWS = 26


def round_trip(group: Group, layout: str, x: Tensor, cotangent: Tensor) -> dict[str, Any]:
    context = build_cp_context(BATCH, group, layout, rows=ROWS)
    ranges = context.partition.rows_of(context.rank)
    rows = [row for start, stop in ranges for row in range(start, stop)]
    leaf = x.clone().requires_grad_()
    piece = context.shard(leaf)
    (d_whole,) = torch.autograd.grad(piece, leaf, (context.rank + 1) * cotangent[:, rows])
    piece = piece.detach().requires_grad_()
    whole = context.unshard(piece)
    (d_piece,) = torch.autograd.grad(whole, piece, (context.rank + 1) * cotangent)
    return {
        "rows": rows,
        "piece": piece.detach(),
        "whole": whole.detach(),
        "d_piece": d_piece,
        "d_whole": d_whole,
    }


def converted(
    group: Group, layout: str, other_layout: str, x: Tensor, cotangent: Tensor
) -> dict[str, Any]:
    here = build_cp_context(BATCH, group, layout, rows=ROWS)
    there = build_cp_context(BATCH, group, other_layout, rows=ROWS)
    leaf = here.shard(x).clone().requires_grad_()
    with recording() as log:
        moved = here.convert(leaf, there)
        (gradient,) = torch.autograd.grad(moved, leaf, there.shard(cotangent))
        log = list(log)
    # The gradient's gradient goes the first way again: of sum((A^T c)^2) in c it is 2 A A^T c.
    weights = there.shard(cotangent).clone().requires_grad_()
    (again,) = torch.autograd.grad(here.convert(leaf, there), leaf, weights, create_graph=True)
    (slope,) = torch.autograd.grad(again.square().sum(), weights)
    second = there.convert(slope * weights.detach(), here)
    return {
        "moved": moved.detach(),
        "there": there.shard(x),
        "gradient": gradient,
        "cotangent_here": here.shard(cotangent),
        "second": second,
        "log": log,
    }


def first_of(group: Group, bounds: list[int], layout: str) -> list[int]:
    """The tokens of this rank, by number."""
    context = build_cp_context(bounds, group, layout)
    tokens = torch.arange(bounds[-1])[None]
    rows: list[int] = context.shard(tokens)[0].tolist()
    return rows


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except InvalidInput as error:
        return str(error)
    return "no error"


def refusals(group: Group) -> dict[str, str]:
    context = build_cp_context(BATCH, group, rows=ROWS)
    another = build_cp_context([0, 9, ROWS], group)
    alone = build_cp_context(BATCH, subgroups(context.rank), rows=ROWS)
    x = context.shard(torch.zeros(1, ROWS, 2))
    return {
        "shard": _message(lambda: context.shard(x)),
        "unshard": _message(lambda: context.unshard(torch.zeros(1, ROWS + 1, 2))),
        "another batch": _message(lambda: context.convert(x, another)),
        "another group": _message(lambda: context.convert(x, alone)),
    }


def subgroups(rank: int) -> Group:
    """A group of this rank alone; the members of the default group that take no part here do not
    ask for it, which torch allows for groups that synchronise among their own members."""
    return torch.distributed.new_group([rank], use_local_synchronization=True)
