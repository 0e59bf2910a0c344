"""Rows that change rank when a batch goes from one partition to another."""

from __future__ import annotations

from dataclasses import dataclass

from longdelta.errors import InvalidInput
from longdelta.plan.partition import Partition


@dataclass(frozen=True)
class Move:
    """`rows` packed rows, from local row `source_row` of one rank to `target_row` of another."""

    source: int
    target: int
    source_row: int
    target_row: int
    rows: int


def conversion(old: Partition, new: Partition) -> tuple[Move, ...]:
    """Every row from its old to its new place, sorted by (source, target, source_row).

    A message per (source, target) carries the moves of that pair in this order. The way back is
    `conversion(new, old)`.

    Raises:
        InvalidInput: the partitions have other documents, rows or numbers of ranks.

    >>> from longdelta.plan.partition import partition
    >>> for move in conversion(partition([0, 8], 2), partition([0, 8], 2, "zigzag")):
    ...     print(move.source, move.target, move.source_row, move.target_row, move.rows)
    0 0 0 0 2
    0 1 2 0 2
    1 0 2 2 2
    1 1 0 2 2
    """
    for name in ("cu_seqlens", "rows", "ranks"):
        if getattr(old, name) != getattr(new, name):
            raise InvalidInput(
                f"both partitions must have the same {name}, got {getattr(old, name)} and "
                f"{getattr(new, name)}; build them from one batch"
            )
    left, right = _ranges(old), _ranges(new)
    moves = []
    at = other = 0
    while at < len(left) and other < len(right):
        (start, stop, source, source_row), (first, last, target, target_row) = (
            left[at],
            right[other],
        )
        low, high = max(start, first), min(stop, last)
        moves.append(
            Move(source, target, source_row + low - start, target_row + low - first, high - low)
        )
        at, other = at + (high == stop), other + (high == last)
    return tuple(sorted(moves, key=lambda move: (move.source, move.target, move.source_row)))


def _ranges(partition: Partition) -> list[tuple[int, int, int, int]]:
    """(start, stop, rank, local row) of every global range, in global order."""
    found = []
    for rank in range(partition.ranks):
        row = 0
        for start, stop in partition.rows_of(rank):
            found.append((start, stop, rank, row))
            row += stop - start
    return sorted(found)
