"""What a rank does in the tests of the context itself."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import longdelta
from longdelta.distributed import build_cp_context
from longdelta.distributed.collectives import Group, recording
from longdelta.errors import InvalidInput
from longdelta.testing.workloads import Workload


def facts(group: Group, bounds: list[int], build: dict[str, Any]) -> dict[str, Any]:
    with recording() as log:
        context = build_cp_context(torch.tensor(bounds), group, **build)
    return {
        "exchanged": [(each.name, each.sent, each.received) for each in log],
        "place": (context.rank, context.ranks),
        "starts": context.starts,
        "ends": context.ends,
        "rows": context.rows,
        "cu_seqlens": context.cu_seqlens.tolist(),
        "text": str(context),
        "contract": [context.keeps_contract(heads) for heads in (4, 32, None)],
    }


def default_group(_: Group) -> tuple[int, int]:
    context = build_cp_context([0, 64])
    return context.rank, context.ranks


def without_autograd(group: Group, work: Workload) -> bool:
    """gdn_forward and gdn_backward against the op with autograd: equal bits in each save mode."""
    context = build_cp_context(
        work.offsets, group, "zigzag", align="segment", num_v_heads=work.HV, rows=work.rows
    )
    x, (do, d_state) = work.inputs(torch.float32), work.cotangents(torch.float32)
    assert x.initial_state is not None
    assert do is not None
    assert d_state is not None
    operands = [context.shard(each).clone() for each in (x.q, x.k, x.v, x.g, x.beta)]
    given: dict[str, Any] = {
        "initial_state": x.initial_state[list(context.starts)].clone(),
        "output_final_state": True,
        "cp_context": context,
    }
    do, d_state = context.shard(do), d_state[list(context.ends)]
    leaves = [each.requires_grad_() for each in (*operands, given["initial_state"])]
    outputs = longdelta.chunk_gated_delta_rule(*operands, **given)
    expected = [*outputs, *torch.autograd.grad(list(outputs), leaves, [do, d_state])]
    same = True
    for save in ("none", "light", "full"):
        o, final_state, saved = longdelta.gdn_forward(*operands, save=save, **given)
        back = longdelta.gdn_backward(do, d_state, *operands, saved=saved, **given)
        found = [o, final_state, *back[:6]]
        same &= all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return same


def saved_of_another(group: Group) -> str:
    """A saved set of one context given to the backward of another with equal local boundaries."""
    work = Workload(lengths=(1024,), K=8, V=8, tail=0)
    contexts = [build_cp_context(bounds, group) for bounds in ([0, 1024], [0, 512, 1024])]
    assert torch.equal(contexts[0].cu_seqlens, contexts[1].cu_seqlens)
    x = work.inputs(torch.float32)
    operands = [contexts[0].shard(each) for each in (x.q, x.k, x.v, x.g, x.beta)]
    _, _, saved = longdelta.gdn_forward(*operands, save="full", cp_context=contexts[0])
    try:
        longdelta.gdn_backward(operands[2], None, *operands, saved=saved, cp_context=contexts[1])
    except InvalidInput as error:
        return str(error)
    return "no error"


def compiled(group: Group, work: Workload) -> bool:
    """The op in a compiled graph, for two contexts of different plans, against eager mode."""
    torch._dynamo.reset()
    contexts = [
        build_cp_context(work.offsets, group, layout, rows=work.rows)
        for layout in ("contiguous", "zigzag")
    ]

    def loss(*operands: torch.Tensor, context: Any) -> torch.Tensor:
        o, _ = longdelta.chunk_gated_delta_rule(*operands, cp_context=context)
        return o.square().sum()

    fast = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    x = work.inputs(torch.float32)
    same = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for context in contexts:
            operands = [context.shard(e).clone() for e in (x.q, x.k, x.v, x.g, x.beta)]
            leaves = [each.requires_grad_() for each in operands]
            wanted = torch.autograd.grad(loss(*leaves, context=context), leaves)
            found = torch.autograd.grad(fast(*leaves, context=context), leaves)
            same &= all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return same
