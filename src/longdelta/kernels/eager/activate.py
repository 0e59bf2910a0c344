"""activate, and adjoint_activate, its way back: L2 norm of q and k, gate activation, beta.

    q^ = q / sqrt(<q, q> + 1e-6)    g = -e^A_log softplus(a + dt_bias)    beta = top / (1 + e^-b)
All in the compute dtype, on contiguous tensors, with exp and log1p alone (Note [Bits]).
"""

from __future__ import annotations

import torch
from torch import Tensor

from longdelta.kernels.stages import NORM_EPS, Activation, Tables


def _inverse_norm(x: Tensor) -> Tensor:
    return 1 / torch.sqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous()


def _shifted(a: Tensor, dt_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    a = _plain(a, dtype)
    return a if dt_bias is None else a + dt_bias.to(dtype)


def activate(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: Activation,
    tables: Tables,
    *,
    q_unit: Tensor | None,
    k_unit: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
) -> None:
    for raw, unit in ((q, q_unit), (k, k_unit)):
        if unit is not None:
            x = _plain(raw, unit.dtype)
            torch.mul(x, _inverse_norm(x), out=unit)
    if g is not None and activation.gate:
        assert A_log is not None
        rate = -torch.exp(A_log.to(g.dtype))
        torch.mul(rate, _softplus(_shifted(a, dt_bias, g.dtype)), out=g)
    elif g is not None:
        g.copy_(a)
    if beta is not None and activation.beta_sigmoid:
        torch.mul(_sigmoid(_plain(b, beta.dtype)), activation.top, out=beta)
    elif beta is not None:
        beta.copy_(b)


def _adjoint_norm(x: Tensor, dy: Tensor) -> Tensor:
    """Gradient of a raw q or k, in the dtype of dy."""
    x = _plain(x, dy.dtype)
    inverse = _inverse_norm(x)
    y = x * inverse
    return inverse * (dy - (dy * y).sum(-1, keepdim=True) * y)


def _adjoint_beta(b: Tensor, dbeta: Tensor, top: float) -> Tensor:
    """Gradient of the raw beta."""
    y = _sigmoid(_plain(b, dbeta.dtype))
    return dbeta * y * (1 - y) * top


def _adjoint_gate(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the raw gate, of A_log and of dt_bias; the last two are sums over tokens."""
    a = _shifted(a, dt_bias, dg.dtype)
    rate = -torch.exp(A_log.to(dg.dtype))
    da = dg * rate * _sigmoid(a)
    return da, (dg * rate * _softplus(a)).sum(0), da.sum(0)


def adjoint_activate(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: Activation,
    tables: Tables,
    dq_unit: Tensor | None,
    dk_unit: Tensor | None,
    dg: Tensor | None,
    dbeta: Tensor | None,
    *,
    dq: Tensor | None,
    dk: Tensor | None,
    da: Tensor | None,
    db: Tensor | None,
    dA_log: Tensor | None,
    ddt_bias: Tensor | None,
    gate_sums: Tensor | None,
) -> None:
    used = tables.walk.used_rows
    for raw, dy, dx in ((q, dq_unit, dq), (k, dk_unit, dk)):
        if dy is not None and dx is not None:
            dx[:used], dx[used:] = _adjoint_norm(raw[:used], dy[:used]), 0
    if dg is not None and da is not None:
        found = dg[:used]
        if activation.gate:
            assert A_log is not None
            found, *sums = _adjoint_gate(a[:used], A_log, dt_bias, found)
            for place, total in zip((dA_log, ddt_bias), sums, strict=True):
                if place is not None:
                    place.copy_(total)
        da[:used], da[used:] = found, 0
    if dbeta is not None and db is not None:
        found = dbeta[:used]
        if activation.beta_sigmoid:
            found = _adjoint_beta(b[:used], found, activation.top)
        db[:used], db[used:] = found, 0
