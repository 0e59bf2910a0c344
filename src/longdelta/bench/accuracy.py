"""Is an arm right? Errors against float64 and against our own arm, and fingerprints of bits.

Note [Cut]: the token recurrence in float64 is too slow for a whole row, and a shorter row would
make peers compile other kernels. So the arm runs the row, with a cotangent that is zero outside the
first tokens of two documents. By causality its output and gradients there are those of these tokens
alone, which the reference computes; heads do not see each other, so two groups of them are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longdelta import reference
from longdelta.bench.problem import Problem
from longdelta.bench.rows import Row

RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta")
LIMIT = 3e-2
"""Relative L2 error that no right arm reaches in bfloat16; measured peers stay below 5e-3."""
CUT_TOKENS = 192
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Cut:
    """Packed rows and q/k heads that the reference computes."""

    rows: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]

    def offsets(self) -> list[int]:
        """cu_seqlens of the rows, packed anew."""
        bounds = [0]
        for start, stop in self.rows:
            bounds.append(bounds[-1] + stop - start)
        return bounds

    def of(self, x: Tensor, row: Row) -> Tensor:
        """``[1, T, heads, ...]`` -> ``[rows, chosen heads, ...]`` on the host."""
        group = x.shape[2] // row.H
        picked = torch.cat([x[0, start:stop] for start, stop in self.rows])
        blocks = [picked[:, head * group : (head + 1) * group] for head in self.heads]
        return torch.cat(blocks, dim=1).cpu()


def cut_of(row: Row, tokens: int = CUT_TOKENS) -> Cut:
    """The first tokens of the first and of the longest document; first and last q/k head."""
    longest = max(range(len(row.lengths)), key=lambda n: row.lengths[n])
    documents = sorted({0, longest})
    rows = tuple((row.offsets[n], row.offsets[n] + min(tokens, row.lengths[n])) for n in documents)
    return Cut(rows, tuple(sorted({0, row.H - 1})))


def cut_cotangent(problem: Problem, cut: Cut) -> Tensor:
    """The row's cotangent, zero outside the cut; Note [Cut]."""
    do = torch.zeros_like(problem.do)
    for start, stop in cut.rows:
        do[:, start:stop] = problem.do[:, start:stop]
    return do


def expected(problem: Problem, cut: Cut, gradients: bool) -> tuple[Tensor, ...]:
    """`RESULTS` of the cut, by the token recurrence in float64; o alone without gradients."""
    row = problem.row
    q, k, v, g, beta = (cut.of(x, row) for x in problem.inputs)
    do, bounds = cut.of(problem.do, row), cut.offsets()
    scale = row.K**-0.5
    out = reference.recurrence(q, k, v, g, beta, scale=scale, cu_seqlens=bounds)
    if not gradients:
        return (out.o,)
    found = reference.recurrence_gradients(q, k, v, g, beta, scale=scale, do=do, cu_seqlens=bounds)
    return (out.o, *found[:5])


def distance(x: Tensor, y: Tensor) -> float:
    """||x - y|| / ||y|| in float64, in blocks; infinite where x has a NaN."""
    error = torch.zeros((), dtype=torch.float64, device=x.device)
    size = torch.zeros_like(error)
    pairs = zip(x.reshape(-1).split(_BLOCK), y.reshape(-1).split(_BLOCK), strict=True)
    for a, b in pairs:
        wide = b.double()
        error += (a.double() - wide).square().sum()
        size += wide.square().sum()
    above, below = error.sqrt().item(), size.sqrt().item()
    if above == 0.0:
        return 0.0
    return above / below if below > 0.0 and above == above else float("inf")


def fingerprint(results: object) -> tuple[int, ...]:
    """One 64-bit number a tensor, equal for equal bits (and for other bits almost never)."""
    if not isinstance(results, tuple):
        return ()
    return tuple(_bits(x) for x in results if isinstance(x, Tensor))


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> int:
    flat = x.detach().contiguous().view(-1).view(_INTEGER[x.element_size()])
    weights = torch.arange(min(flat.numel(), _BLOCK), device=x.device) * 2 + 1
    weights = weights * 0x1E3779B97F4A7C15
    sums = [(part.to(torch.int64) * weights[: part.numel()]).sum() for part in flat.split(_BLOCK)]
    total = 0
    for each in torch.stack(sums).tolist() if sums else []:
        total = (total * 0x5851F42D4C957F2D + each) % (1 << 64)
    return total


def verdict(errors: dict[str, float], gates: str) -> str:
    """Why an arm is not timed, or nothing. Under strong gates the true dg is too small to judge."""
    judged = [name for name in errors if name != "dg" or gates != "strong"]
    bad = [f"{name} {errors[name]:.1e}" for name in judged if not errors[name] <= LIMIT]
    return f"wrong against float64: {', '.join(bad)} (limit {LIMIT:g})" if bad else ""
