"""Rows of whole tensors to ranks, back, and from one layout to another, with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longdelta.distributed import collectives
from longdelta.distributed.collectives import Group
from longdelta.distributed.linear import linear
from longdelta.plan.conversion import Move
from longdelta.plan.partition import Partition


def sharded(x: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The rows of these ranges, in order."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


def _pairs(moves: Sequence[Move]) -> dict[tuple[int, int], list[Move]]:
    pairs: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        pairs.setdefault((move.source, move.target), []).append(move)
    return pairs


def _move(x: Tensor, moves: Sequence[Move], rows: int, group: Group, tag: int) -> Tensor:
    """x [rows here, ...] -> [rows there, ...]: one message per pair of ranks."""
    rank, _ = collectives.place_in(group)
    result = x.new_empty(rows, *x.shape[1:])
    sends, receives, into = [], [], []
    for (source, target), held in _pairs(moves).items():
        if rank not in (source, target):
            continue
        if source == target:
            for move in held:
                result[move.target_row : move.target_row + move.rows] = x[
                    move.source_row : move.source_row + move.rows
                ]
        elif source == rank:
            parts = [x[move.source_row : move.source_row + move.rows] for move in held]
            sends.append((target, torch.cat(parts)))
        else:
            total = sum(move.rows for move in held)
            receives.append((source, x.new_empty(total, *x.shape[1:])))
            into.append(held)
    collectives.exchange("shard", sends, receives, group, tag)
    for held, (_, came) in zip(into, receives, strict=True):
        at = 0
        for move in held:
            result[move.target_row : move.target_row + move.rows] = came[at : at + move.rows]
            at += move.rows
    return result


def moved(
    x: Tensor,
    dim: int,
    moves: tuple[tuple[Move, ...], tuple[Move, ...]],
    rows: tuple[int, int],
    group: Group,
    tag: int,
) -> Tensor:
    """Rows of one layout as rows of another; `moves` and `rows`: there, and back."""

    def there(rows_first: Tensor) -> Tensor:
        return _move(rows_first.contiguous(), moves[0], rows[0], group, tag)

    def back(gradient: Tensor) -> Tensor:
        return _move(gradient.contiguous(), moves[1], rows[1], group, tag)

    return linear(x.movedim(dim, 0), there, back).movedim(0, dim)


def _whole(x: Tensor, held: Partition, group: Group, tag: int) -> Tensor:
    rank, ranks = collectives.place_in(group)
    parts = [x.new_empty(held.local_rows(peer), *x.shape[1:]) for peer in range(ranks)]
    parts[rank] = x.contiguous()
    others = [peer for peer in range(ranks) if peer != rank]
    sends = [(peer, parts[rank]) for peer in others if parts[rank].numel()]
    receives = [(peer, parts[peer]) for peer in others if parts[peer].numel()]
    collectives.exchange("unshard", sends, receives, group, tag)
    result = x.new_empty(held.rows, *x.shape[1:])
    for peer, part in enumerate(parts):
        at = 0
        for start, stop in held.rows_of(peer):
            result[start:stop] = part[at : at + stop - start]
            at += stop - start
    return result


def _summed(gradient: Tensor, held: Partition, group: Group, tag: int) -> Tensor:
    """Every rank's gradient of this rank's rows, summed in rank order."""
    rank, ranks = collectives.place_in(group)
    pieces = [sharded(gradient, 0, held.rows_of(peer)).contiguous() for peer in range(ranks)]
    mine = [torch.empty_like(pieces[rank]) for _ in range(ranks)]
    mine[rank] = pieces[rank]
    others = [peer for peer in range(ranks) if peer != rank]
    sends = [(peer, pieces[peer]) for peer in others if pieces[peer].numel()]
    receives = [(peer, mine[peer]) for peer in others if mine[peer].numel()]
    collectives.exchange("unshard", sends, receives, group, tag)
    total = mine[0]
    for part in mine[1:]:
        total = total + part
    return total


def unsharded(x: Tensor, dim: int, held: Partition, group: Group, tag: int) -> Tensor:
    """The whole tensor on every rank."""

    def there(rows_first: Tensor) -> Tensor:
        return _whole(rows_first.contiguous(), held, group, tag)

    def back(gradient: Tensor) -> Tensor:
        return _summed(gradient.contiguous(), held, group, tag)

    return linear(x.movedim(dim, 0), there, back).movedim(0, dim)
