"""The balanced layout: whole short documents, long ones split, equal cost a rank, few crossings.

The cost of a document is its chunks: every stage does the same work for each chunk. With `share`
the mean cost of a rank and `slack = share // 16`:

1. Documents of more than `slack` chunks come first, the longest before the others, ties by index.
   One that fits whole goes to the fullest rank that it leaves at most at `share`, else to the
   emptiest one if that stays within `share + slack`. One that fits nowhere is split over the ranks
   with the most room, as few of them as hold all of it but `slack`, each filled up to `share`; its
   pieces follow the order of those ranks, and the last of them takes the rest.
2. The other documents are never split: the longest first, each to the rank with the least load.

So a rank carries at most `share + slack` chunks, and, where cuts are bound to segment borders, the
distance from the wished cuts to those. No cut splits a chunk.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from longdelta.plan.chunks import CHUNK, Fragment, segment_borders
from longdelta.plan.cuts import nearest

SLACK_SHIFT = 4
"""A rank may exceed the mean by a sixteenth before one more document is split."""


def chunk_count(document_tokens: int) -> int:
    """Chunks of a document, the cost unit.

    >>> chunk_count(0), chunk_count(1), chunk_count(65)
    (0, 1, 2)
    """
    return -(-document_tokens // CHUNK)


def balanced_pieces(
    lengths: Sequence[int], ranks: int, on_borders: bool = False, num_v_heads: int | None = None
) -> Iterator[tuple[int, Fragment]]:
    """(rank, fragment) for every non-empty document; see the module's text for the rule.

    Args:
        lengths: tokens of each document.
        on_borders: cut on segment borders (for `num_v_heads`) only, else on any chunk border.

    >>> for rank, piece in balanced_pieces([64, 640, 64, 64], 2):
    ...     print(rank, piece.document, piece.offset, piece.length)
    0 1 0 448
    1 1 448 192
    1 0 0 64
    1 2 0 64
    1 3 0 64
    """
    costs = [chunk_count(length) for length in lengths]
    share = -(-sum(costs) // ranks)
    slack = share >> SLACK_SHIFT
    load = [0] * ranks
    order = sorted((d for d in range(len(costs)) if costs[d]), key=lambda d: (-costs[d], d))
    longs = [document for document in order if costs[document] > slack]
    for document in longs:
        tokens, cost = lengths[document], costs[document]
        home, fits = _home(load, cost, share, slack)
        cuts = segment_borders(tokens, num_v_heads) if on_borders else range(CHUNK, tokens, CHUNK)
        if fits or not cuts:
            load[home] += cost
            yield home, Fragment(document, 0, tokens)
        else:
            yield from _split(document, tokens, load, share, slack, cuts)
    least = [(load[rank], rank) for rank in range(ranks)]
    heapq.heapify(least)
    for document in order[len(longs) :]:
        carried, rank = least[0]
        heapq.heapreplace(least, (carried + costs[document], rank))
        yield rank, Fragment(document, 0, lengths[document])


def _home(load: list[int], cost: int, share: int, slack: int) -> tuple[int, bool]:
    """The rank that takes a whole document, and whether it has the room."""
    tight = [rank for rank in range(len(load)) if load[rank] + cost <= share]
    if tight:
        return max(tight, key=lambda rank: (load[rank], -rank)), True
    emptiest = load.index(min(load))
    return emptiest, load[emptiest] + cost <= share + slack


def _split(
    document: int, tokens: int, load: list[int], share: int, slack: int, cuts: range
) -> Iterator[tuple[int, Fragment]]:
    """Fill the ranks with the most room; the last of them takes what is left. Updates `load`."""
    cost = chunk_count(tokens)
    chosen: list[int] = []
    held = 0
    for rank in sorted(range(len(load)), key=lambda rank: (load[rank], rank)):
        if chosen and held >= cost - slack:
            break
        chosen.append(rank)
        held += share - load[rank]
    chosen.sort()
    start = wanted = 0
    for rank in chosen:
        wanted += (share - load[rank]) * CHUNK
        stop = tokens if rank == chosen[-1] else nearest(cuts, wanted, tokens)
        if start < stop:
            load[rank] += chunk_count(stop - start)
            yield rank, Fragment(document, start, stop - start)
            start = stop
