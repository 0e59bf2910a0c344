"""Operations and bytes that a row needs, whoever computes it, and the ceilings of the card.

Counted for the chunked algorithm at its leanest, per token and value head with G = HV / H, from
B = 2 C K V, m_K = 2 C C K, m_V = 2 C C V and t = 2 C^3 a chunk of C = 64 tokens:

    forward     3 B + 2 m_V + 2 m_K / G + t / 2           reads q k v g beta, writes o
    backward    9 B + 6 m_V + 4 m_K + m_K / G             reads q k v g beta do and the inverse,
                                                          writes dq dk dv dg dbeta

The backward computes the states once more instead of keeping them. No arm does less; what one does
beyond this (summaries of segments, tapes) counts as its own loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdelta.bench.problem import Place
from longdelta.bench.rows import Row
from longdelta.bench.timing import Slot, Timer
from longdelta.plan.chunks import CHUNK

_PARTS = {"fwd": (1, 0), "bwd": (0, 1), "fwdbwd": (1, 1), "checkpointed": (2, 1)}
"""Forwards and backwards in each operation."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes of one operation of a row, all ranks together."""

    flops: int
    bytes: int


def work_of(row: Row, op: str, itemsize: int = 2) -> Work:
    """What an operation ("fwd", "bwd", "fwdbwd", "checkpointed") needs.

    >>> row = Row("one", 1, 3, (64,))
    >>> round(work_of(row, "fwd").flops / (64 * 3), -2), work_of(row, "fwd").bytes // (64 * 3)
    (146100.0, 690)
    """
    C, H, HV, K, V = CHUNK, row.H, row.HV, row.K, row.V
    B, mk, mv, t = 2 * C * K * V, 2 * C * C * K, 2 * C * C * V, 2 * C**3
    flops = (
        HV * (3 * B + 2 * mv + t // 2) + H * 2 * mk,
        HV * (9 * B + 6 * mv + 4 * mk) + H * mk,
    )
    keys, values, scalars = H * K * itemsize, HV * V * itemsize, HV * 4
    moved = (
        2 * keys + 2 * values + 2 * scalars,
        4 * keys + 3 * values + 4 * scalars + HV * C * 2,
    )
    counts = _PARTS[op]
    return Work(
        sum(n * each for n, each in zip(counts, flops, strict=True)) * row.tokens // C,
        sum(n * each for n, each in zip(counts, moved, strict=True)) * row.tokens,
    )


@dataclass(frozen=True)
class Ceilings:
    """What one device reaches in this run: a bfloat16 matrix product, and a copy (read + write)."""

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, work: Work, ranks: int) -> float:
        """Least time of the work, shared evenly by the ranks."""
        seconds = max(work.flops / self.flops_per_s, work.bytes / self.bytes_per_s)
        return 1e3 * seconds / ranks


def measured_ceilings(place: Place, timer: Timer, warmup: int, timed: int) -> Ceilings:
    """Times a square matrix product of random numbers and a copy, on every rank at once."""
    large = place.device.type == "cuda"
    # A copy has to miss every cache: the last one of a CPU may hold a hundred MiB.
    side, size = (8192, 1 << 30) if large else (256, 256 << 20)
    dtype = torch.bfloat16 if large else torch.float32
    x, y = (torch.randn(side, side, device=place.device, dtype=dtype) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    _, product = timer.measure(lambda: x @ y, Slot("", "matmul", "", "", 0), warmup, timed)
    _, copy = timer.measure(
        lambda: target.copy_(source), Slot("", "copy", "", "", 0), warmup, timed
    )
    return Ceilings(2e3 * side**3 / product, 2e3 * size / copy)
