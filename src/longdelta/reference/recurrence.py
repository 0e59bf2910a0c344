"""The definition: the gated delta rule, one token after another, and its adjoint.

With row vectors q, k, v, a state S of K x V, a_t = e^{g_t} and s = scale, per value head:

    P_t = a_t S_{t-1}                      the state decays,
    u_t = beta_t (v_t - k_t P_t)           the value is corrected by what the decayed state holds,
    S_t = P_t + k_t^T u_t                  the correction is written under the key,
    o_t = s q_t S_t                        the query reads the new state.

g enters only as e^g, so g = -inf is exact: the token forgets everything before it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class RecurrenceResult(NamedTuple):
    """o: ``[T, HV, V]``; final_state: ``[N, HV, K, V]``, the state after each document."""

    o: Tensor
    final_state: Tensor


class Gradients(NamedTuple):
    """Gradients in the shapes of the inputs.

    dq, dk: ``[T, H, K]``; dv: ``[T, HV, V]``; dg, dbeta: ``[T, HV]``;
    d_initial_state: ``[N, HV, K, V]``.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    d_initial_state: Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> RecurrenceResult:
    """Gated delta rule over packed documents, token by token.

        S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - k_t e^{g_t} S_{t-1}),        o_t = scale q_t S_t

    Args:
        q, k: ``[T, H, K]``.
        v: ``[T, HV, V]``, HV a multiple of H; value head h reads q/k head ``h // (HV // H)``.
        g: ``[T, HV]``, natural log of the decay of one token; -inf is exact.
        beta: ``[T, HV]``, the share of the correction that is written.
        scale: factor of the output.
        initial_state: ``[N, HV, K, V]``, the state before each document; None is zero.
        cu_seqlens: ``N + 1`` boundaries, repeats mark empty documents; None is one document.
            Rows after the last boundary give zero.

    Returns:
        ``RecurrenceResult(o, final_state)``, float64, differentiable by autograd.

    Source: arXiv:2412.06464.
    """
    T, HV, V = v.shape
    S0, bounds = _states_and_bounds(k, v, initial_state, cu_seqlens)
    # unbind, not q[t]: the adjoint of one unbind is one stack, that of T selects is quadratic.
    qs, ks = _per_value_head(q, HV).unbind(), _per_value_head(k, HV).unbind()
    vs, betas, decays = v.double().unbind(), beta.double().unbind(), g.double().exp().unbind()

    o = [S0.new_zeros(0, HV, V)]
    final_state = [S0[:0]]
    for n, (begin, end) in enumerate(pairwise(bounds)):
        S = S0[n]
        for t in range(begin, end):
            P = decays[t][:, None, None] * S
            u = betas[t][:, None] * (vs[t] - _row(ks[t], P))
            S = P + _outer(ks[t], u)
            o.append(scale * _row(qs[t], S)[None])
        final_state.append(S[None])
    o.append(S0.new_zeros(T - bounds[-1], HV, V))
    return RecurrenceResult(torch.cat(o), torch.cat(final_state))


@torch.no_grad()
def recurrence_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    do: Tensor,
    d_final_state: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Gradients:
    """Adjoint of ``recurrence``, written by hand, token by token from the end to the start.

    With P, u, S of the forward, and dS the cotangent of S_t that comes from later tokens:

        dq = s do S_t^T            dS <- dS + s q^T do
        du = k dS                  dk = u dS^T
        dw = beta du = dv          dbeta = <du, v - k P>
        dP = dS - k^T dw           dk <- dk - dw P^T
        dg = <dP, P>               dS <- e^g dP        (the cotangent of S_{t-1})

    Args:
        q, k, v, g, beta, scale, initial_state, cu_seqlens: as in ``recurrence``.
        do: ``[T, HV, V]``, cotangent of o.
        d_final_state: ``[N, HV, K, V]``, cotangent of final_state; None is zero.

    Returns:
        ``Gradients``, float64, dq and dk summed over their group. Keeps 8 HV K V bytes a token.

    Source: arXiv:2412.06464; the adjoint is derived in docs/math.md.
    """
    T, HV = v.shape[:2]
    H, K = k.shape[1:]
    S0, bounds = _states_and_bounds(k, v, initial_state, cu_seqlens)
    dS0 = torch.zeros_like(S0) if d_final_state is None else d_final_state.double().clone()
    q, k = _per_value_head(q, HV), _per_value_head(k, HV)
    v, beta, decay, do = v.double(), beta.double(), g.double().exp(), do.double()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dg, dbeta = torch.zeros_like(beta), torch.zeros_like(beta)
    for n, (begin, end) in enumerate(pairwise(bounds)):
        decayed = _decayed_states(k, v, decay, beta, S0[n], range(begin, end))
        dS = dS0[n]
        for t in reversed(range(begin, end)):
            P = decayed.pop()
            w = v[t] - _row(k[t], P)
            u = beta[t, :, None] * w
            dq[t] = scale * _row(do[t], (P + _outer(k[t], u)).mT)
            dS = dS + scale * _outer(q[t], do[t])
            du = _row(k[t], dS)
            dv[t] = beta[t, :, None] * du
            dbeta[t] = (du * w).sum(-1)
            dP = dS - _outer(k[t], dv[t])
            dk[t] = _row(u, dS.mT) - _row(dv[t], P.mT)
            dg[t] = (dP * P).sum((-2, -1))
            dS = decay[t, :, None, None] * dP
        dS0[n] = dS
    dq, dk = (x.reshape(T, H, HV // H, K).sum(2) for x in (dq, dk))
    return Gradients(dq, dk, dv, dg, dbeta, dS0)


def _states_and_bounds(
    k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Sequence[int] | None
) -> tuple[Tensor, list[int]]:
    (T, HV, V), K = v.shape, k.shape[2]
    bounds = [0, T] if cu_seqlens is None else list(cu_seqlens)
    zeros = torch.zeros(len(bounds) - 1, HV, K, V, dtype=torch.float64)
    return (zeros if initial_state is None else initial_state.double()), bounds


def _decayed_states(
    k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, S: Tensor, tokens: range
) -> list[Tensor]:
    """P of every token of a document that starts from S."""
    decayed = []
    for t in tokens:
        P = decay[t, :, None, None] * S
        S = P + _outer(k[t], beta[t, :, None] * (v[t] - _row(k[t], P)))
        decayed.append(P)
    return decayed


def _per_value_head(x: Tensor, HV: int) -> Tensor:
    """``[T, H, K]`` to ``[T, HV, K]``: every value head gets its group's row."""
    return x.double().repeat_interleave(HV // x.shape[1], dim=1)


def _row(x: Tensor, S: Tensor) -> Tensor:
    """x S of every head: ``[HV, K]`` times ``[HV, K, V]``."""
    return (x[:, None, :] @ S)[:, 0]


def _outer(x: Tensor, y: Tensor) -> Tensor:
    """x^T y of every head: ``[HV, K, V]``."""
    return x[:, :, None] * y[:, None, :]
