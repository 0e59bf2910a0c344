"""How long places are busy that take walks one after another."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import groupby


def span(chunks: Sequence[int], copies: int, places: int, *, in_turn: bool = False) -> int:
    """Chunks one after another where walks of so many chunks, the longest first and each in so many
    copies, are taken by so many places: in turn, or by whichever is free.

    >>> span([32], copies=32, places=132), span([64, 60], copies=96, places=132)
    (32, 124)
    """
    if in_turn:
        return sum(chunks[walk // copies] for walk in range(0, len(chunks) * copies, places))
    free = {0: places}  # from when on, how many
    whens = [0]
    for length, same in groupby(chunks):
        left = copies * sum(1 for _ in same)
        while left:
            when = whens[0]
            taken = min(free[when], left)
            if taken < free[when]:
                free[when] -= taken
            else:
                del free[heappop(whens)]
            if when + length not in free:
                heappush(whens, when + length)
            free[when + length] = free.get(when + length, 0) + taken
            left -= taken
    return max(free)
