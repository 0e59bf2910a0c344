"""scan: state and output, one chunk after another, every segment from its own S_in.

    W = V - E K S        Uh = W + (Gam * Z) (b W)        U = b Uh
    O = s (E Q S + (Gam * Q K^T) U)                      S <- gamma S + K^T (r U)
The tapes that gradients needs (S at the chunk's start, Uh) come from this walk and no other, in the
forward or again in the backward, so that every save mode has the same bits.
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
    scatter_rows,
    store,
    task_blocks,
)
from longdelta.kernels.stages import Tables
from longdelta.plan.chunks import CHUNK


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    G: Tensor,
    Z: Tensor,
    S_border: Tensor,
    initial_state: Tensor | None,
    scale: float,
    tables: Tables,
    *,
    o: Tensor | None,
    final_state: Tensor | None,
    S: Tensor | None,
    Uh: Tensor | None,
) -> None:
    HV, K, V, dtype = v.shape[1], k.shape[2], v.shape[2], G.dtype
    output = None if o is None else G.new_empty(tables.walk.chunks, HV, CHUNK, V)
    for tasks in task_blocks(tables, "scan", HV * max(K * V, CHUNK * CHUNK, CHUNK * V)):
        state = new_states(tasks, G, HV, K, V)
        load(state, tasks.start, initial_state)
        load(state, tasks.enter, S_border)
        for step in range(tasks.chunks[0]):
            n = tasks.active(step)
            chunks = tasks.first[:n] + step
            gates = Gates.of(G[chunks])
            keys = repeat_heads(gather(k, tables, chunks, dtype), HV)
            values = gather(v, tables, chunks, dtype).flatten(0, 1)
            b = gather(beta, tables, chunks, dtype).flatten(0, 1)[:, :, None]
            now = state[:n].flatten(0, 1)
            W = values - gates.E * torch.bmm(keys, now)
            solved = W + torch.bmm(gates.Gam * Z[chunks].flatten(0, 1), b * W)
            if S is not None and Uh is not None:
                S[chunks] = state[:n]
                Uh[chunks] = solved.view(n, HV, CHUNK, V)
            U = b * solved
            if output is not None:
                queries = repeat_heads(gather(q, tables, chunks, dtype), HV)
                inside = gates.Gam * torch.bmm(queries, keys.transpose(1, 2))
                read = gates.E * torch.bmm(queries, now) + torch.bmm(inside, U)
                output[chunks] = (scale * read).view(n, HV, CHUNK, V)
            update = torch.bmm(keys.transpose(1, 2), gates.r * U)
            state[:n] = (gates.gamma * now + update).view(n, HV, K, V)
        store(state, tasks.end, target=final_state)
    if o is not None and output is not None:
        if tables.walk.chunks:
            scatter_rows(output, tables, 0, tables.walk.chunks, out=o)
        o[tables.walk.used_rows :] = 0
