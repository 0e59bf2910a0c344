"""What a rank does in the tests: one call of the op on its rows, as plain results.

Each process loads this file by itself, so it imports nothing of its neighbours.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from longdelta.distributed import CPContext, build_cp_context
from longdelta.distributed.collectives import Group, Sent, all_gather, recording
from longdelta.distributed.context import _say_once
from longdelta.testing.workloads import Cotangents, Inputs, Results, Workload, evaluate


def context_of(group: Group | None, work: Workload, **build: Any) -> CPContext:
    """The workload's context, rows after its last document included."""
    return build_cp_context(work.offsets, group, rows=work.rows, **build)


def local(context: CPContext, work: Workload, dtype: torch.dtype) -> tuple[Inputs, Cotangents]:
    """This rank's part of the workload's tensors."""
    whole, cotangents = work.inputs(dtype), work.cotangents(dtype)
    state = whole.initial_state
    inputs = Inputs(
        *(context.shard(x) for x in (whole.q, whole.k, whole.v, whole.g, whole.beta)),
        initial_state=None if state is None else state[list(context.starts)],
        cu_seqlens=None,
    )
    do, d_state = cotangents
    assert do is not None
    assert d_state is not None
    return inputs, Cotangents(context.shard(do), d_state[list(context.ends)])


def op(
    group: Group | None,
    work: Workload,
    dtype: torch.dtype,
    builds: list[dict[str, Any]],
    options: dict[str, Any],
) -> list[tuple[Results, list[Sent]]]:
    """Per context: outputs and gradients of this rank, and what was exchanged for them."""
    found = []
    for build in builds:
        context = context_of(group, work, **build)
        inputs, cotangents = local(context, work, dtype)
        with recording() as log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = evaluate(inputs, cotangents, cp_context=context, **options)
        found.append((results, log))
    return found


def continued(group: Group, work: Workload) -> Results:
    """The op twice, the second time from the first one's final states, sent to their owners."""
    context = context_of(group, work, layout="zigzag", align="segment", num_v_heads=work.HV)
    inputs, cotangents = local(context, work, torch.float32)
    _, state, *_ = evaluate(inputs, cotangents, leaves=(), cp_context=context)
    assert state is not None
    documents = len(work.lengths)
    whole = state.new_zeros(documents, *state.shape[1:])
    whole[list(context.ends)] = state
    # Each document ends on one rank: the others add zeros.
    total = all_gather("states", whole, group).sum(0)
    inputs = inputs.with_(initial_state=total[list(context.starts)])
    return evaluate(inputs, cotangents, leaves=(), cp_context=context)


def warned(group: Group, work: Workload) -> list[str]:
    """What two calls with each of two contexts warn of, in a process that has not warned yet."""
    _say_once.cache_clear()
    build = {"num_v_heads": work.HV}
    if max(work.lengths) > 1024:
        build["align"] = "segment"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for layout in ("contiguous", "zigzag"):
            context = context_of(group, work, layout=layout, **build)
            inputs, cotangents = local(context, work, torch.float32)
            for _ in range(2):
                evaluate(inputs, cotangents, cp_context=context)
    return [str(each.message) for each in said]
