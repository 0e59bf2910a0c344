"""What a rank does in the tests of the convolution and the layer."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdelta.distributed import CPContext, build_cp_context
from longdelta.distributed.collectives import Group, Sent, recording
from longdelta.nn import GatedDeltaNet, LayerState, causal_conv1d

HIDDEN, H, HV, DIM = 12, 1, 2, 8
CHANNELS = 2 * H * DIM + HV * DIM


class ConvProblem(NamedTuple):
    """Inputs and cotangents of a convolution of the whole batch."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    initial_state: Tensor | None
    dy: Tensor
    d_final_state: Tensor


class Conv(NamedTuple):
    """Results of the whole batch, or of one rank's rows and documents."""

    y: Tensor
    final_state: Tensor
    dx: Tensor
    dweight: Tensor
    dbias: Tensor
    d_initial_state: Tensor | None


def conv_problem(
    bounds: list[int],
    W: int,
    dtype: torch.dtype = torch.float64,
    *,
    initial: bool = True,
    rest: int = 2,
    D: int = 3,
) -> ConvProblem:
    random = torch.Generator().manual_seed(W)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    rows, documents = bounds[-1] + rest, len(bounds) - 1
    state = normal(documents, D, W - 1)
    return ConvProblem(
        normal(1, rows, D),
        normal(D, W),
        normal(D),
        state if initial else None,
        normal(1, rows, D),
        normal(documents, D, W - 1),
    )


def convolved(problem: ConvProblem, **options: Any) -> Conv:
    """The convolution and its gradients."""
    state = problem.initial_state
    leaves = [
        x.detach().clone().requires_grad_()
        for x in (problem.x, problem.weight, problem.bias, state)
        if x is not None
    ]
    y, final_state = causal_conv1d(
        *leaves[:3],
        initial_state=leaves[3] if state is not None else None,
        output_final_state=True,
        **options,
    )
    assert final_state is not None
    found = torch.autograd.grad(
        [y, final_state], leaves, [problem.dy, problem.d_final_state], allow_unused=True
    )
    dx, dweight, dbias, *rest = found
    return Conv(y.detach(), final_state.detach(), dx, dweight, dbias, rest[0] if rest else None)


def conv(
    group: Group, bounds: list[int], problem: ConvProblem, layout: str
) -> tuple[Conv, Conv, list[Sent]]:
    """With SiLU and without, and what the latter exchanged."""
    context = build_cp_context(bounds, group, layout, rows=problem.x.shape[1])
    state = problem.initial_state
    local = problem._replace(
        x=context.shard(problem.x),
        dy=context.shard(problem.dy),
        initial_state=None if state is None else state[list(context.starts)],
        d_final_state=problem.d_final_state[list(context.ends)],
    )
    active = convolved(local, cp_context=context, activation="silu")
    with recording() as log:
        plain = convolved(local, cp_context=context, activation=None)
    return active, plain, log


class Layer(NamedTuple):
    """A layer's results; gradients of the parameters by name."""

    y: Tensor
    conv_state: Tensor
    S: Tensor
    dx: Tensor
    d_conv: Tensor
    d_S: Tensor
    parameters: dict[str, Tensor]


def layer_problem(bounds: list[int], rest: int = 2) -> list[Tensor]:
    """x, dy, the state and its cotangent (conv, S)."""
    random = torch.Generator().manual_seed(3)
    rows, N = bounds[-1] + rest, len(bounds) - 1
    shapes = [(1, rows, HIDDEN)] * 2 + [(N, CHANNELS, 3), (N, HV, DIM, DIM)] * 2
    return [torch.randn(s, generator=random, dtype=torch.float64) for s in shapes]


def mixed(
    x: Tensor, dy: Tensor, conv: Tensor, S: Tensor, d_conv: Tensor, d_S: Tensor, **options: Any
) -> Layer:
    """The layer with fixed weights, and all its gradients."""
    torch.manual_seed(5)
    module = GatedDeltaNet(HIDDEN, H, HV, head_dim=DIM).double()
    x, conv, S = (each.detach().clone().requires_grad_() for each in (x, conv, S))
    y, state = module(x, initial_state=LayerState(conv, S), output_final_state=True, **options)
    torch.autograd.backward([y, *state], [dy, d_conv, d_S])
    assert x.grad is not None
    assert conv.grad is not None
    assert S.grad is not None
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    found = [y.detach(), state.conv.detach(), state.S.detach(), x.grad, conv.grad, S.grad]
    return Layer(*found, gradients)


def layer(group: Group, bounds: list[int], build: dict[str, Any]) -> Layer:
    x, dy, conv, S, d_conv, d_S = layer_problem(bounds)
    context: CPContext = build_cp_context(bounds, group, rows=x.shape[1], **build)
    starts, ends = list(context.starts), list(context.ends)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mixed(
            context.shard(x),
            context.shard(dy),
            conv[starts],
            S[starts],
            d_conv[ends],
            d_S[ends],
            cp_context=context,
        )
