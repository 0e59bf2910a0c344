"""How long places are busy that take walks one after another."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def span(chunks: Sequence[int], copies: int, places: int, *, in_turn: bool = False) -> int:
    """Chunks one after another where walks of so many chunks, the longest first and each in so many
    copies, are taken by so many places: in turn, or by whichever is free.

    >>> span([32], copies=32, places=132), span([64, 60], copies=96, places=132)
    (32, 124)
    """
    if in_turn:
        return sum(chunks[walk // copies] for walk in range(0, len(chunks) * copies, places))
    free, end = [(0, places)], 0  # from when on, how many
    for length in chunks:
        left = copies
        while left:
            start, n = heappop(free)
            taken = min(n, left)
            if taken < n:
                heappush(free, (start, n - taken))
            heappush(free, (start + length, taken))
            left -= taken
            end = max(end, start + length)
    return end
