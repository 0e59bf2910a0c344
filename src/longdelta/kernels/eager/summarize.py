"""summarize: what a segment does to the state that enters it, S_out = M S_in + S_ext.

Chunk by chunk, with X = D (I + Z^T D) K:
    S <- gamma S - X^T (gamma K S - r V)        M <- gamma (M - X^T K M)
The first segment of a document is walked from its initial state and needs no M; a segment between
two borders is walked from zero and M from the identity; the last one gives nothing.
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
from longdelta.kernels.stages import Tables, Tasks
from longdelta.plan.chunks import CHUNK


def _walk(
    operands: tuple[Tensor, ...], initial_state: Tensor | None, tasks: Tasks, tables: Tables
) -> tuple[Tensor, Tensor]:
    k, v, beta, G, Z = operands
    HV, K, V, dtype = v.shape[1], k.shape[2], v.shape[2], G.dtype
    S = new_states(tasks, G, HV, K, V)
    load(S, tasks.start, initial_state)
    M = new_states(tasks, G, HV, K, K)
    M.diagonal(dim1=-2, dim2=-1).fill_(1)
    for step in range(tasks.chunks[0]):
        n = tasks.active(step)
        chunks = tasks.first[:n] + step
        gates = Gates.of(G[chunks])
        keys = repeat_heads(gather(k, tables, chunks, dtype), HV)
        b = gather(beta, tables, chunks, dtype).flatten(0, 1)[:, :, None]
        values = gather(v, tables, chunks, dtype).flatten(0, 1)
        X = b * (keys + torch.bmm(Z[chunks].flatten(0, 1).transpose(1, 2), b * keys))
        state, transition = S[:n].flatten(0, 1), M[:n].flatten(0, 1)
        error = gates.gamma * torch.bmm(keys, state) - gates.r * values
        state = gates.gamma * state - torch.bmm(X.transpose(1, 2), error)
        moved = torch.bmm(X.transpose(1, 2), torch.bmm(keys, transition))
        S[:n] = state.view(n, HV, K, V)
        M[:n] = (gates.gamma * (transition - moved)).view(n, HV, K, K)
    return S, M


def summarize(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    G: Tensor,
    Z: Tensor,
    initial_state: Tensor | None,
    tables: Tables,
    *,
    S_border: Tensor,
    M: Tensor,
) -> None:
    HV, K, V = v.shape[1], k.shape[2], v.shape[2]
    for tasks in task_blocks(tables, "summarize", HV * max(K, CHUNK) * max(K, V, CHUNK)):
        S, transition = _walk((k, v, beta, G, Z), initial_state, tasks, tables)
        store(S, tasks.leave, target=S_border)
        store(transition, tasks.map, target=M)
