"""summarize: what a segment does to the state that enters it, S_out = M S_in + S_ext.

Chunk by chunk, with X = D (I + Z^T D) K:
    S <- gamma S - X^T (gamma K S - r V)        P <- P - X^T K P,    M = e^{sum of g} P
The gate enters M once, at the end: inside the walk it would take M to subnormal numbers, whose
products are many times slower on a CPU (docs/log.md, 2026-11-30).
Every chunk is walked: `bound`, by which a backend may leave out what is forgotten, is only summed.
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
) -> tuple[Tensor, Tensor, Tensor]:
    k, v, beta, G, Z, bound = operands
    HV, K, V, dtype = v.shape[1], k.shape[2], v.shape[2], G.dtype
    S = new_states(tasks, G, HV, K, V)
    load(S, tasks.start, initial_state)
    P = new_states(tasks, G, HV, K, K)
    P.diagonal(dim1=-2, dim2=-1).fill_(1)
    total = new_states(tasks, G, HV, 1, 1)
    growth = new_states(tasks, G, HV, 1, 1)[..., 0, 0]
    for step in range(tasks.chunks[0]):
        n = tasks.active(step)
        chunks = tasks.first[:n] + step
        gates = Gates.of(G[chunks])
        keys = repeat_heads(gather(k, tables, chunks, dtype), HV)
        b = gather(beta, tables, chunks, dtype).flatten(0, 1)[:, :, None]
        values = gather(v, tables, chunks, dtype).flatten(0, 1)
        X = b * (keys + torch.bmm(Z[chunks].flatten(0, 1).transpose(1, 2), b * keys))
        state, product = S[:n].flatten(0, 1), P[:n].flatten(0, 1)
        error = gates.gamma * torch.bmm(keys, state) - gates.r * values
        state = gates.gamma * state - torch.bmm(X.transpose(1, 2), error)
        moved = torch.bmm(X.transpose(1, 2), torch.bmm(keys, product))
        S[:n] = state.view(n, HV, K, V)
        P[:n] = (product - moved).view(n, HV, K, K)
        total[:n] += G[chunks][:, :, -1:, None]
        growth[:n] += bound[chunks]
    return S, torch.exp(total) * P, growth


def summarize(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    G: Tensor,
    Z: Tensor,
    bound: Tensor,
    initial_state: Tensor | None,
    tables: Tables,
    *,
    S_border: Tensor,
    M: Tensor,
    M_bound: Tensor,
) -> None:
    HV, K, V = v.shape[1], k.shape[2], v.shape[2]
    for tasks in task_blocks(tables, "summarize", HV * max(K, CHUNK) * max(K, V, CHUNK)):
        operands = (k, v, beta, G, Z, bound)
        S, transition, growth = _walk(operands, initial_state, tasks, tables)
        store(S, tasks.leave, target=S_border)
        store(transition, tasks.map, target=M)
        store(growth, tasks.map, target=M_bound)
