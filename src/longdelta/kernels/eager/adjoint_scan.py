"""adjoint_scan: the cotangent of the state, one chunk after another from each segment's end.

    dU = s (Gam * Q K^T)^T dO + r (K dS)      dR = dU + (Gam * Z)^T (b dU)      dW = b dR
    dS <- gamma dS + (s E Q)^T dO - (E K)^T dW
Tapes for gradients: dS at each chunk's end, dR.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longdelta.kernels.eager.chunked import (
    Gates,
    gather,
    load,
    new_states,
    repeat_heads,
    store,
    task_blocks,
)
from longdelta.kernels.stages import Tables
from longdelta.plan.chunks import CHUNK


def adjoint_scan(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    do: Tensor,
    G: Tensor,
    Z: Tensor,
    dS_border: Tensor,
    d_final_state: Tensor | None,
    scale: float,
    tables: Tables,
    *,
    dS: Tensor,
    dR: Tensor,
    d_initial_state: Tensor | None,
) -> None:
    HV, K, V, dtype = do.shape[1], k.shape[2], do.shape[2], G.dtype
    for tasks in task_blocks(tables, "scan", HV * max(K * V, CHUNK * CHUNK, CHUNK * V)):
        state = new_states(tasks, G, HV, K, V)
        load(state, tasks.end, d_final_state)
        load(state, tasks.leave, dS_border)
        for step in range(tasks.chunks[0]):
            n = tasks.active(step)
            chunks = tasks.last[:n] - step
            gates = Gates.of(G[chunks])
            keys = repeat_heads(gather(k, tables, chunks, dtype), HV)
            queries = repeat_heads(gather(q, tables, chunks, dtype), HV)
            b = gather(beta, tables, chunks, dtype).flatten(0, 1)[:, :, None]
            cotangent = gather(do, tables, chunks, dtype).flatten(0, 1)
            now = state[:n].flatten(0, 1)
            inside = scale * gates.Gam * torch.bmm(queries, keys.transpose(1, 2))
            dU = torch.bmm(inside.transpose(1, 2), cotangent) + gates.r * torch.bmm(keys, now)
            link = (gates.Gam * Z[chunks].flatten(0, 1)).transpose(1, 2)
            solved = dU + torch.bmm(link, b * dU)
            dS[chunks] = state[:n]
            dR[chunks] = solved.view(n, HV, CHUNK, V)
            read = torch.bmm((scale * gates.E * queries).transpose(1, 2), cotangent)
            write = torch.bmm((gates.E * keys).transpose(1, 2), b * solved)
            state[:n] = (gates.gamma * now + read - write).view(n, HV, K, V)
        store(state, tasks.start, target=d_initial_state)
