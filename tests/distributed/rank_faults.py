"""What a rank does wrong in the tests of faults."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
import weakref
from typing import Any

import torch

import longdelta
from longdelta.distributed import CPContext, build_cp_context
from longdelta.distributed.collectives import Group, destroy
from longdelta.errors import InvalidInput
from longdelta.testing.workloads import Inputs, Workload

WORK = Workload(lengths=(1024,), tail=0, K=8, V=8)


def build(group: Group, arguments: list[dict[str, Any]]) -> None:
    """Each rank with its own arguments."""
    rank = torch.distributed.get_rank(group)
    build_cp_context(**({"cu_seqlens": [0, 600, 1024], "group": group} | arguments[rank]))


def _operands(context: CPContext) -> list[torch.Tensor]:
    x: Inputs = WORK.inputs(torch.float32)
    return [context.shard(each).clone() for each in (x.q, x.k, x.v, x.g, x.beta)]


def _op(context: CPContext, operands: list[torch.Tensor]) -> torch.Tensor:
    o, _ = longdelta.chunk_gated_delta_rule(*operands, cp_context=context)
    return o


def two_plans(group: Group, sides: list[int]) -> torch.Tensor:
    """Ranks use contexts of different plans with equal rows in one call."""
    contexts = [build_cp_context(bounds, group) for bounds in ([0, 1024], [0, 1023, 1024])]
    context = contexts[sides[contexts[0].rank]]
    return _op(context, _operands(context))


def two_calls(group: Group) -> torch.Tensor:
    """One rank calls the op, the other a layout conversion of the same context."""
    context = build_cp_context(WORK.offsets, group)
    operands = _operands(context)
    if context.rank == 0:
        return _op(context, operands)
    return context.unshard(operands[0])


def other_rows(group: Group) -> torch.Tensor:
    """Rank 1 hands over the rows of another plan; rank 0 waits for nobody."""
    context = build_cp_context(WORK.offsets, group)
    other = build_cp_context([0, 1000], group)
    operands = _operands(context)
    if context.rank == 1:
        operands = [x[:, : other.rows] for x in operands]
    return _op(context, operands)


def after_destruction(group: Group, what: str) -> torch.Tensor:
    context = build_cp_context(WORK.offsets, group)
    operands = [x.requires_grad_() for x in _operands(context)]
    rows = operands[2].detach().flatten(2)
    o = _op(context, operands)
    destroy(group)
    if what == "backward":
        o.sum().backward()
    elif what == "op":
        _op(context, operands)
    elif what == "conv":
        longdelta.causal_conv1d(rows, torch.ones(rows.shape[2], 4), cp_context=context)
    elif what == "unshard":
        context.unshard(rows)
    return rows


def let_go(group: Group) -> tuple[bool, bool, bool]:
    """With the caller's reference gone: is what the op needs of the context alive before the
    backward, are the gradients those of a caller who kept it, and is it gone with the graph?"""
    context: CPContext | None = build_cp_context(WORK.offsets, group)
    assert context is not None
    operands = [x.requires_grad_() for x in _operands(context)]
    kept = torch.autograd.grad(_op(context, operands).sum(), operands)
    o, watched = _op(context, operands), weakref.ref(context._parts)
    context = None
    gc.collect()
    alive = watched() is not None
    gradients = torch.autograd.grad(o.sum(), operands)
    same = all(torch.equal(x, y) for x, y in zip(gradients, kept, strict=True))
    del o
    gc.collect()
    return alive, same, watched() is None


def copies(group: Group) -> list[str]:
    """What pickling and copying a context say."""
    context = build_cp_context(WORK.offsets, group)
    said = []
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        try:
            duplicate(context)
        except InvalidInput as error:
            said.append(str(error))
    return said


def elsewhere(group: Group) -> None:
    """A group of rank 1 alone, used by rank 0 too."""
    alone = torch.distributed.new_group([1])
    build_cp_context(WORK.offsets, alone)


def dies(group: Group, when: str) -> torch.Tensor:
    """Rank 1 ends between the context and the op, or between forward and backward."""
    context = build_cp_context(WORK.offsets, group)
    operands = [x.requires_grad_() for x in _operands(context)]
    if context.rank == 1 and when == "forward":
        os._exit(3)
    o = _op(context, operands)
    if context.rank == 1:
        os._exit(3)
    o.sum().backward()
    return o


def sleeps(group: Group, seconds: float) -> int:
    rank = torch.distributed.get_rank(group)
    if rank == 0:
        time.sleep(seconds)
    return rank


def fails_on(group: Group, rank: int) -> int:
    place = torch.distributed.get_rank(group)
    if place == rank:
        raise KeyError("no such thing")
    return place
