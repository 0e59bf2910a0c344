"""gradients: every token's gradients from the tapes, all chunks alike.

With U = b Uh, dW = b dR, A = s Gam * (dO U^T) and Y = -tril(Gam * (dW U^T), -1):
    dV = dW        dbeta = <dR, Uh>        dQ = s E dO S^T + A K
    dK = [r U dS^T + A^T Q + Y^T K] + [Y K - E dW S^T] = columns + rows
    dG = <dQ, Q> + <rows, K> - <columns, K>; at the last token + sum <r U dS^T, K> + gamma <dS, S>
    dg = reverse cumulative sum of dG in the chunk, 0 where g lies on or below its floor
A and Y are the same numbers on both sides of the difference, so that dG keeps its digits where the
gate is strong. dQ and dK are summed over the value heads of a q/k head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longdelta.kernels.eager.chunked import (
    Gates,
    chunk_blocks,
    gather,
    repeat_heads,
    scatter_rows,
)
from longdelta.kernels.eager.prepare import cumulative
from longdelta.kernels.stages import GATE_FLOOR, Tables
from longdelta.plan.chunks import CHUNK


def _sum_group(x: Tensor, H: int, HV: int) -> Tensor:
    """[n * HV, C, K] -> [n, H, C, K]: the value heads of a group, in order."""
    heads = x.view(-1, H, HV // H, *x.shape[1:])
    total = heads[:, :, 0]
    for head in range(1, HV // H):
        total = total + heads[:, :, head]
    return total


def _chunk_gradients(
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    tapes: tuple[Tensor, Tensor, Tensor, Tensor],
    gates: Gates,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk of each value head, dv, dG and dbeta; everything flat over [n * HV]."""
    queries, keys, b, cotangent = operands
    S, Uh, dS, dR = tapes
    U, dW = b * Uh, b * dR
    A = scale * gates.Gam * torch.bmm(cotangent, U.transpose(1, 2))
    Y = -(gates.Gam * torch.bmm(dW, U.transpose(1, 2))).tril(-1)
    dq = scale * gates.E * torch.bmm(cotangent, S.transpose(1, 2)) + torch.bmm(A, keys)
    written = gates.r * torch.bmm(U, dS.transpose(1, 2))
    columns = written + torch.bmm(A.transpose(1, 2), queries) + torch.bmm(Y.transpose(1, 2), keys)
    rows = torch.bmm(Y, keys) - gates.E * torch.bmm(dW, S.transpose(1, 2))
    dG = (dq * queries).sum(-1) + (rows * keys).sum(-1) - (columns * keys).sum(-1)
    kept = (written * keys).sum(-1).sum(-1) + gates.gamma[:, 0, 0] * (dS * S).sum(-1).sum(-1)
    dG[:, -1] += kept
    return dq, columns + rows, dW, dG, (dR * Uh).sum(-1)


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    G: Tensor,
    S: Tensor,
    Uh: Tensor,
    dS: Tensor,
    dR: Tensor,
    scale: float,
    tables: Tables,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor,
) -> None:
    H, HV, K, V = k.shape[1], g.shape[1], k.shape[2], do.shape[2]
    for first, last in chunk_blocks(tables, HV * max(K * V, CHUNK * CHUNK, CHUNK * K, CHUNK * V)):
        chunks = torch.arange(first, last, device=k.device)

        def take(x: Tensor, chunks: Tensor = chunks) -> Tensor:
            return gather(x, tables, chunks, G.dtype)

        operands = (
            repeat_heads(take(q), HV),
            repeat_heads(take(k), HV),
            take(beta).flatten(0, 1)[:, :, None],
            take(do).flatten(0, 1),
        )
        tapes = (
            S[first:last].flatten(0, 1),
            Uh[first:last].flatten(0, 1),
            dS[first:last].flatten(0, 1),
            dR[first:last].flatten(0, 1),
        )
        gates = Gates.of(G[first:last])
        dq_head, dk_head, dv_chunk, dG, dbeta_chunk = _chunk_gradients(
            operands, tapes, gates, scale
        )
        dg_chunk = cumulative(dG.flip(-1)).flip(-1).view(-1, HV, CHUNK)
        scatter_rows(_sum_group(dq_head, H, HV), tables, first, last, out=dq)
        scatter_rows(_sum_group(dk_head, H, HV), tables, first, last, out=dk)
        scatter_rows(dv_chunk.view(-1, HV, CHUNK, V), tables, first, last, out=dv)
        scatter_rows(dg_chunk.masked_fill(take(g) <= GATE_FLOOR, 0), tables, first, last, out=dg)
        scatter_rows(dbeta_chunk.view(-1, HV, CHUNK), tables, first, last, out=dbeta)
    for gradient in (dq, dk, dv, dg, dbeta):
        gradient[tables.walk.used_rows :] = 0
