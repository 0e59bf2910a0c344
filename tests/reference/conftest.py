"""Inputs for the tests of the reference: one packed batch, by the kind of its gates and betas."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from longdelta.reference import Gradients, gate, l2norm


class Batch(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    do: Tensor
    d_final_state: Tensor
    cu_seqlens: list[int]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self[:5]

    @property
    def forward(self) -> dict[str, Any]:
        return {
            "scale": 0.37,
            "initial_state": self.initial_state,
            "cu_seqlens": self.cu_seqlens,
        }

    @property
    def backward(self) -> dict[str, Any]:
        return {**self.forward, "do": self.do, "d_final_state": self.d_final_state}

    def autograd(self, forward: Callable[..., tuple[Tensor, Tensor]]) -> Gradients:
        """The gradients of a forward by autograd."""
        leaves = [x.clone().requires_grad_() for x in (*self.inputs, self.initial_state)]
        outputs = forward(*leaves[:5], **{**self.forward, "initial_state": leaves[5]})
        cotangents = (self.do, self.d_final_state)
        return Gradients(*torch.autograd.grad(tuple(outputs), leaves, cotangents))


def make_batch(
    lengths: Sequence[int],
    gates: str | float = "mild",
    betas: str = "sigmoid",
    tail: int = 0,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (8, 12),
) -> Batch:
    """Random documents of these lengths, then `tail` rows that belong to none."""
    random = torch.Generator().manual_seed(20)
    (H, HV), (K, V), N = heads, dims, len(lengths)
    bounds = list(accumulate(lengths, initial=0))
    T = bounds[-1] + tail

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k, v = l2norm(normal(T, H, K)), l2norm(normal(T, H, K)), normal(T, HV, V)
    mild, steps, shares = -0.1 * normal(T, HV).square(), normal(T, HV), normal(T, HV).sigmoid()
    if gates in ("mild", "reset"):
        g = mild
    elif gates == "model":
        # A up to 16 and steps of 1e-3 to 1e-1, as layers are initialised.
        bias = torch.linspace(math.log(1e-3), math.log(1e-1), HV).double()
        g = gate(steps, torch.linspace(0.25, 16, HV).log(), bias)
    else:
        g = torch.full((T, HV), float(gates), dtype=torch.float64)
    if gates == "reset":
        for begin, end in pairwise(bounds):
            g[begin + 2 * (end - begin) // 3 : end][:1] = -torch.inf
    if betas == "to_two":
        beta = 2 * shares
        beta[::3], beta[1::5] = 2.0, 0.0
    else:
        beta = shares if betas == "sigmoid" else torch.zeros_like(shares)
    return Batch(
        *(q, k, v, g, beta, normal(N, HV, K, V)),
        *(normal(T, HV, V), normal(N, HV, K, V), bounds),
    )


@pytest.fixture(name="make_batch")
def _make_batch() -> Callable[..., Batch]:
    return make_batch
