"""adjoint_summarize: the cotangent that leaves a segment backwards, dS_in = M^T dS_out + dS_ext.

Chunk by chunk from the end, with X' = D (I + Z D) K and R = s E (Q - tril(Q K^T) X'):
    dS <- gamma (dS - X'^T (K dS)) + R^T dO
The last segment of a document is walked from the cotangent of its final state; a segment between
two borders from zero (its M is the forward's); the first one gives nothing.
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


def adjoint_summarize(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    do: Tensor,
    G: Tensor,
    Z: Tensor,
    bound: Tensor,
    d_final_state: Tensor | None,
    scale: float,
    tables: Tables,
    *,
    dS_border: Tensor,
) -> None:
    HV, K, V, dtype = do.shape[1], k.shape[2], do.shape[2], G.dtype
    for tasks in task_blocks(tables, "adjoint_summarize", HV * max(K, CHUNK) * max(K, V, CHUNK)):
        state = new_states(tasks, G, HV, K, V)
        load(state, tasks.end, d_final_state)
        for step in range(tasks.chunks[0]):
            n = tasks.active(step)
            chunks = tasks.last[:n] - step
            gates = Gates.of(G[chunks])
            keys = repeat_heads(gather(k, tables, chunks, dtype), HV)
            queries = repeat_heads(gather(q, tables, chunks, dtype), HV)
            b = gather(beta, tables, chunks, dtype).flatten(0, 1)[:, :, None]
            X = b * (keys + torch.bmm(Z[chunks].flatten(0, 1), b * keys))
            inside = torch.bmm(queries, keys.transpose(1, 2)).tril()
            R = scale * gates.E * (queries - torch.bmm(inside, X))
            now = state[:n].flatten(0, 1)
            now = gates.gamma * (now - torch.bmm(X.transpose(1, 2), torch.bmm(keys, now)))
            cotangent = gather(do, tables, chunks, dtype).flatten(0, 1)
            now = now + torch.bmm(R.transpose(1, 2), cotangent)
            state[:n] = now.view(n, HV, K, V)
        store(state, tasks.enter, target=dS_border)
