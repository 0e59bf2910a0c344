"""Context parallelism by heads: every rank gets all tokens of some heads, computes, and gives back.

One all-to-all in and one out, in each direction: q, k, v, g and beta travel as one message, float32
as pairs of bfloat16 words, and so do their gradients. Shards may have unequal lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longdelta.distributed import collectives
from longdelta.distributed.collectives import Group
from longdelta.errors import UnsupportedProblem

Op = Callable[..., Tensor]


@dataclass(frozen=True)
class HeadSplit:
    """Rows of each rank and the group; heads go to ranks in equal blocks."""

    rows: tuple[int, ...]
    rank: int
    group: Group

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[1, rows here, heads, ...] of each -> [1, all rows, heads / ranks, ...] of each."""
        ranks, here = len(self.rows), self.rows[self.rank]
        wire = tensors[0].dtype
        parts = [_words(x, wire).view(here, ranks, -1) for x in tensors]
        sizes = [part.shape[2] for part in parts]
        packed = torch.cat(parts, dim=2).transpose(0, 1).reshape(ranks * here, -1)
        came = collectives.all_to_all("heads", packed, [here] * ranks, self.rows, self.group)
        split = came.split(sizes, dim=1)
        return [
            _tensor(words, x.dtype, (1, sum(self.rows), x.shape[2] // ranks, *x.shape[3:]))
            for words, x in zip(split, tensors, strict=True)
        ]

    def to_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[1, all rows, heads / ranks, ...] of each -> [1, rows here, heads, ...] of each."""
        ranks, here, total = len(self.rows), self.rows[self.rank], sum(self.rows)
        wire = tensors[0].dtype
        parts = [_words(x, wire).view(total, -1) for x in tensors]
        sizes = [part.shape[1] for part in parts]
        packed = torch.cat(parts, dim=1)
        came = collectives.all_to_all("heads", packed, self.rows, [here] * ranks, self.group)
        split = came.view(ranks, here, -1).transpose(0, 1).split(sizes, dim=2)
        return [
            _tensor(words, x.dtype, (1, here, x.shape[2] * ranks, *x.shape[3:]))
            for words, x in zip(split, tensors, strict=True)
        ]


def _words(x: Tensor, wire: torch.dtype) -> Tensor:
    """x in words of the wire's size, head by head."""
    x = x.contiguous()
    return x.view(1, *x.shape[1:3], -1).view(wire)[0]


def _tensor(words: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return words.contiguous().view(dtype).view(shape)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: HeadSplit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.split = split
        return tuple(split.to_heads(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, *ctx.split.to_rows(gradients))


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: HeadSplit, o: Tensor) -> Tensor:
        ctx.split = split
        return split.to_rows([o])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, ctx.split.to_heads(gradients)[0]


_to_heads: type[torch.autograd.Function] = _ToHeads
_to_rows: type[torch.autograd.Function] = _ToRows
"""Under their base's name, so that a type checker knows whose untyped `apply` it is."""


def by_heads(op: Op, split: HeadSplit, H: int, HV: int) -> Op:
    """An op on whole sequences as one on this rank's rows.

    Raises:
        UnsupportedProblem: the ranks do not divide the heads.
    """
    ranks = len(split.rows)
    if H % ranks or HV % ranks:
        raise UnsupportedProblem(f"{ranks} ranks do not divide the heads ({H}, {HV})")

    def run(*tensors: Tensor) -> Tensor:
        split_heads: tuple[Tensor, ...] = _to_heads.apply(split, *tensors)
        o: Tensor = _to_rows.apply(split, op(*split_heads))
        return o

    return run
