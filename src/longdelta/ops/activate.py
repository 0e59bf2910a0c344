"""Raw inputs to what the rule takes, and back: L2 norm of q and k, gate activation, beta.

    q^ = q / sqrt(sum q^2 + 1e-6)    g = -e^{A_log} softplus(a + dt_bias)    beta = m / (1 + e^{-b})
with m = 2 where negative eigenvalues are allowed, else 1. All in the compute dtype, on contiguous
tensors, with exp and log1p alone (Note [Bits] of the eager backend).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NORM_EPS = 1e-6


@dataclass(frozen=True)
class Activation:
    """Which inputs come raw."""

    qk_l2norm: bool = False
    gate: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False


@dataclass(frozen=True)
class Activated:
    """q, k, g, beta as the rule takes them."""

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor


def _inverse_norm(x: Tensor) -> Tensor:
    return 1 / torch.sqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


def activate(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: Activation,
    dtype: torch.dtype,
) -> Activated:
    """The inputs as the rule takes them, in the compute dtype."""
    if activation.qk_l2norm:
        q, k = _plain(q, dtype), _plain(k, dtype)
        q, k = q * _inverse_norm(q), k * _inverse_norm(k)
    g, beta = _plain(g, dtype), _plain(beta, dtype)
    if activation.gate:
        assert A_log is not None
        a = g if dt_bias is None else g + dt_bias.to(dtype)
        g = -torch.exp(A_log.to(dtype)) * _softplus(a)
    if activation.beta_sigmoid:
        beta = _sigmoid(beta) * (2 if activation.neg_eigval else 1)
    return Activated(q, k, g, beta)


def _adjoint_norm(x: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
    x = _plain(x, dtype)
    inverse = _inverse_norm(x)
    y = x * inverse
    return inverse * (dy - (dy * y).sum(-1, keepdim=True) * y)


def adjoint_norm(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the raw q and k, in the dtype of dq."""
    return _adjoint_norm(q, dq, dq.dtype), _adjoint_norm(k, dk, dk.dtype)


def adjoint_beta(b: Tensor, dbeta: Tensor, neg_eigval: bool) -> Tensor:
    """Gradient of the raw beta."""
    y = _sigmoid(_plain(b, dbeta.dtype))
    return dbeta * y * (1 - y) * (2 if neg_eigval else 1)


def adjoint_gate(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the raw gate, of A_log and of dt_bias; the last two are sums over tokens."""
    a = _plain(a, dg.dtype)
    if dt_bias is not None:
        a = a + dt_bias.to(dg.dtype)
    rate = -torch.exp(A_log.to(dg.dtype))
    da = dg * rate * _sigmoid(a)
    return da, (dg * rate * _softplus(a)).sum(0), da.sum(0)
