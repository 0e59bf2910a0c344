"""Rows that the short convolution of a fragment needs from the fragments before it.

A causal convolution of kernel size W reads the W - 1 rows before a fragment of a document (fewer
near the document's start, where the rest are zeros). They may lie on several ranks, on the same
rank in another fragment, and one row may serve several fragments.

Note [Halo buffer]: a rank receives its rows into one buffer, fragment after fragment in local
order, each in document order. Forward fills `buffer[places] = x[rows]` per message. The adjoint is
the transpose over the same messages: the target sends `d_buffer[places]` back and the source adds
`dx[rows] += ...`, message after message and row after row, which fixes the order of each sum.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from longdelta.plan.chains import chains
from longdelta.plan.checks import checked_int
from longdelta.plan.partition import Partition


@dataclass(frozen=True)
class HaloMessage:
    """Rows that one rank gives another; a rank's own (source == target) are copied, not sent.

    Attributes:
        rows: rows of the source's packed tensor.
        places: rows of the target's halo buffer, one for each.
    """

    source: int
    target: int
    rows: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Halo:
    """The halo of one kernel size: see Note [Halo buffer].

    Attributes:
        kernel_size: rows that the convolution reads, its own included.
        bounds: per rank, boundaries of its fragments in its halo buffer (like cu_seqlens).
        messages: sorted by (source, target), none empty.
    """

    kernel_size: int
    bounds: tuple[tuple[int, ...], ...]
    messages: tuple[HaloMessage, ...]

    def rows_sent(self, rank: int) -> int:
        """Rows that leave a rank in forward and come back in the adjoint."""
        return sum(
            len(message.rows)
            for message in self.messages
            if message.source == rank != message.target
        )

    def rows_received(self, rank: int) -> int:
        """Rows that reach a rank in forward and leave it in the adjoint."""
        return sum(
            len(message.rows)
            for message in self.messages
            if message.target == rank != message.source
        )


def halo(partition: Partition, kernel_size: int) -> Halo:
    """The rows to exchange for a convolution of `kernel_size` rows.

    Raises:
        InvalidInput: kernel_size is no integer of at least 1.

    >>> from longdelta.plan.partition import partition
    >>> plan = halo(partition([0, 6], 2), 3)
    >>> plan.messages, plan.bounds
    ((HaloMessage(source=0, target=1, rows=(1, 2), places=(0, 1)),), ((0, 0), (0, 2)))
    """
    kernel_size = checked_int("kernel_size", kernel_size, least=1)
    bounds = tuple(_bounds(partition, rank, kernel_size) for rank in range(partition.ranks))
    first_row = [partition.local_cu_seqlens(rank) for rank in range(partition.ranks)]
    pairs: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for chain in chains(partition):
        offsets = [link.offset for link in chain.links]
        for link in chain.links:
            start, stop = bounds[link.rank][link.index], bounds[link.rank][link.index + 1]
            for place in range(start, stop):
                token = link.offset - stop + place
                giver = chain.links[bisect_right(offsets, token) - 1]
                rows, places = pairs.setdefault((giver.rank, link.rank), ([], []))
                rows.append(first_row[giver.rank][giver.index] + token - giver.offset)
                places.append(place)
    return Halo(
        kernel_size=kernel_size,
        bounds=bounds,
        messages=tuple(
            HaloMessage(*pair, tuple(pairs[pair][0]), tuple(pairs[pair][1]))
            for pair in sorted(pairs)
        ),
    )


def _bounds(partition: Partition, rank: int, kernel_size: int) -> tuple[int, ...]:
    bounds = [0]
    for piece in partition.fragments[rank]:
        bounds.append(bounds[-1] + min(kernel_size - 1, piece.offset))
    return tuple(bounds)
