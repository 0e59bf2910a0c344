"""What a rank does in the tests of checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import longdelta
from longdelta.distributed import CPContext, RecomputeHandle, build_cp_context
from longdelta.distributed.collectives import Group, recording
from longdelta.testing.workloads import Workload

WORK = Workload(lengths=(600, 0, 2100), K=8, V=8, tail=2)


class Run(NamedTuple):
    """Gradients by leaf, names of what was exchanged, bytes that the handles hold."""

    gradients: list[Tensor]
    exchanged: list[str]
    held_bytes: int


def block(context: CPContext, leaves: list[Tensor], **options: Any) -> Tensor:
    """A convolution of v and the op, as in a layer."""
    q, k, v, g, beta, state, weight = leaves
    mixed, _ = longdelta.causal_conv1d(v.flatten(2), weight, activation="silu", cp_context=context)
    o, final_state = longdelta.chunk_gated_delta_rule(
        q,
        k,
        mixed.view(v.shape),
        g,
        beta,
        initial_state=state,
        output_final_state=True,
        cp_context=context,
        **options,
    )
    assert final_state is not None
    return (o.square().sum() + final_state.square().sum()).reshape(1)


def leaves_of(context: CPContext) -> list[Tensor]:
    x = WORK.inputs(torch.float32)
    assert x.initial_state is not None
    held = [context.shard(each) for each in (x.q, x.k, x.v, x.g, x.beta)]
    held += [x.initial_state[list(context.starts)], torch.ones(WORK.HV * WORK.V, 4) / 4]
    return [each.clone().requires_grad_() for each in held]


def _ways(handle: RecomputeHandle) -> dict[str, Callable[..., Tensor]]:
    def run(fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
        found: Tensor = handle.run(fn, *args)
        return found

    def plain(fn: Callable[..., Tensor], *args: Tensor, use_reentrant: bool) -> Tensor:
        found: Tensor = torch_checkpoint(fn, *args, use_reentrant=use_reentrant)
        return found

    return {
        "not at all": lambda fn, *x: fn(*x),
        "ours": lambda fn, *x: longdelta.checkpoint(fn, *x),
        "ours reentrant": lambda fn, *x: longdelta.checkpoint(fn, *x, use_reentrant=True),
        "torch": lambda fn, *x: plain(fn, *x, use_reentrant=False),
        "torch reentrant": lambda fn, *x: plain(fn, *x, use_reentrant=True),
        "explicit": lambda fn, *x: plain(lambda *y: run(fn, *y), *x, use_reentrant=False),
    }


def checkpointed(group: Group, how: str, layers: int, deterministic: bool) -> Run:
    """`layers` blocks one after another, each checkpointed in this way."""
    context = build_cp_context(
        WORK.offsets, group, "zigzag", align="segment", num_v_heads=WORK.HV, rows=WORK.rows
    )
    leaves = leaves_of(context)
    handles = [RecomputeHandle() for _ in range(layers)]
    loss = torch.zeros(1)

    def one(*args: Tensor) -> Tensor:
        return block(context, list(args), deterministic=deterministic)

    with recording() as log:
        for handle in handles:
            loss = loss + _ways(handle)[how](one, *leaves)
        loss.backward()
    gradients = [x.grad for x in leaves if x.grad is not None]
    held = sum(handle.nbytes for handle in handles)
    return Run(gradients, [each.name for each in log], held)


def op_argument(group: Group, uses: int, clear: bool) -> list[int]:
    """The op called again and again with one handle; exchanges of each call."""
    context = build_cp_context(WORK.offsets, group, rows=WORK.rows)
    leaves = leaves_of(context)
    handle, counts = RecomputeHandle(), []
    for _ in range(uses):
        if clear:
            handle.clear()
        with recording() as log:
            block(context, [x.detach() for x in leaves], recompute=handle)
        counts.append(sum(each.name == "relay" for each in log))
    return counts
