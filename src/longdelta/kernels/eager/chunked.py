"""Rows to padded chunks and back, gates of a chunk, and states of tasks.

A chunk's operands are [n, heads, C, d], contiguous, in the compute dtype; missing tokens of a
ragged chunk are zero (q, k, v, do, beta) and do not decay (g).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longdelta.kernels.stages import Pairs, Tables, Tasks
from longdelta.plan.chunks import CHUNK

_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Elements of the largest temporary of a block. CPU: 4 MiB in float32; 2^18 and 2^22 were slower at
16,384 tokens (docs/log.md, 2026-11-30). GPU: launches are what costs time."""


def gather(x: Tensor, tables: Tables, chunks: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, heads, ...] -> [n, heads, C, ...] for the chunks given by index."""
    rows, mask = tables.chunk_rows[chunks], tables.chunk_mask[chunks]
    taken = x[rows].to(dtype)
    mask = mask.reshape(mask.shape + (1,) * (taken.dim() - 2))
    return torch.where(mask, taken, 0).transpose(1, 2).contiguous()


def scatter_rows(padded: Tensor, tables: Tables, first: int, last: int, *, out: Tensor) -> None:
    """Chunks [first, last) as [n, heads, C, ...] back to the rows of out [T, heads, ...]."""
    walk = tables.walk
    start, stop = walk.chunk_row[first], walk.chunk_row[last - 1] + walk.chunk_length[last - 1]
    slots = tables.row_slot[start:stop] - first * CHUNK
    out[start:stop] = padded.transpose(1, 2).flatten(0, 1).index_select(0, slots).to(out.dtype)


def _fitting(tables: Tables, elements: int) -> int:
    return max(1, _BLOCK_ELEMENTS.get(tables.device.type, 1 << 20) // elements)


def chunk_blocks(tables: Tables, elements_per_chunk: int) -> Iterator[tuple[int, int]]:
    """Ranges of chunks that keep temporaries small, for stages that treat chunks alike."""
    size = _fitting(tables, elements_per_chunk)
    for first in range(0, tables.walk.chunks, size):
        yield first, min(first + size, tables.walk.chunks)


def task_blocks(tables: Tables, stage: str, elements_per_task: int) -> tuple[Tasks, ...]:
    """Blocks of segments that keep temporaries small, for stages that walk."""
    return tables.blocks(stage, _fitting(tables, elements_per_task))


def repeat_heads(x: Tensor, HV: int) -> Tensor:
    """[n, H, ...] -> [n * HV, ...]: value head h reads q/k head h // (HV // H)."""
    return x.repeat_interleave(HV // x.shape[1], dim=1).flatten(0, 1)


def masked_exp(difference: Tensor, mask: Tensor) -> Tensor:
    """e^difference where the mask holds, else 0; selected before exp, so that nothing overflows."""
    return torch.exp(difference.masked_fill(~mask, float("-inf")))


@dataclass(frozen=True)
class Gates:
    """Factors of a chunk, flattened over [n * HV]: every exponent is <= 0 where g is."""

    E: Tensor
    """[., C, 1] e^{G_i}"""
    r: Tensor
    """[., C, 1] e^{G_C - G_i}"""
    gamma: Tensor
    """[., 1, 1] e^{G_C}"""
    Gam: Tensor
    """[., C, C] e^{G_i - G_j} for i >= j, else 0"""

    @classmethod
    def of(cls, G: Tensor) -> Gates:
        G = G.flatten(0, 1)
        last = G[:, -1:]
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=G.device).tril()
        return cls(
            E=torch.exp(G)[:, :, None],
            r=torch.exp(last - G)[:, :, None],
            gamma=torch.exp(last)[:, :, None],
            Gam=masked_exp(G[:, :, None] - G[:, None, :], lower),
        )


def load(state: Tensor, pairs: Pairs, source: Tensor | None) -> None:
    """state[positions] = source[rows]; None stands for zeros."""
    if source is not None and len(pairs.rows):
        state.index_copy_(0, pairs.positions, source.index_select(0, pairs.rows).to(state.dtype))


def store(state: Tensor, pairs: Pairs, *, target: Tensor | None) -> None:
    """target[rows] = state[positions]; None: nobody asked."""
    if target is not None and len(pairs.rows):
        chosen = state.index_select(0, pairs.positions)
        target.index_copy_(0, pairs.rows, chosen.to(target.dtype))


def new_states(tasks: Tasks, like: Tensor, HV: int, rows: int, columns: int) -> Tensor:
    """Zero states of a block of tasks."""
    return like.new_zeros(len(tasks.chunks), HV, rows, columns)
