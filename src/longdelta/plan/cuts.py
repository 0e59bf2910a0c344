"""Where the regular layouts cut the packed stream, and how a cut moves to a segment border."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise

from longdelta.plan.chunks import Fragment, segment_borders


def near_equal_cuts(total: int, parts: int) -> list[int]:
    """`parts + 1` cuts of a length into near-equal parts, the first `total % parts` one longer.

    >>> near_equal_cuts(8, 3)
    [0, 3, 6, 8]
    """
    size, longer = divmod(total, parts)
    return [part * size + min(part, longer) for part in range(parts + 1)]


def nearest(cuts: range, wanted: int, end: int) -> int:
    """The one of 0, the cuts and the end that is nearest to the wanted offset; the lower of two.

    >>> nearest(range(64, 200, 64), 97, 200), nearest(range(64, 200, 64), 96, 200)
    (128, 64)
    """
    above = bisect_left(cuts, wanted)
    upper = cuts[above] if above < len(cuts) else end
    lower = cuts[above - 1] if above else 0
    return lower if wanted - lower <= upper - wanted else upper


def snap(offset: int, document_tokens: int, num_v_heads: int | None) -> int:
    """Nearest segment border or end of a document to a token offset in it; the lower of two.

    >>> snap(70, 100, None), snap(700, 1000, 6)
    (100, 512)
    """
    return nearest(segment_borders(document_tokens, num_v_heads), offset, document_tokens)


def layout_pieces(
    bounds: tuple[int, ...], ranks: int, layout: str, move: Callable[[int, int], int] | None = None
) -> list[list[Fragment]]:
    """Pieces of each rank in the contiguous and zigzag layouts.

    move: where a cut goes, from its offset in a document and that document's tokens. In
        zigzag_per_document it may leave a short document whole, which then goes to the rank with
        the fewest tokens so far, the first of several; else all of them would pile up on one.

    >>> layout_pieces((0, 3), 1, "zigzag")
    [[Fragment(document=0, offset=0, length=2), Fragment(document=0, offset=2, length=1)]]
    """
    pieces: list[list[Fragment]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    per_document = layout == "zigzag_per_document"
    parts = ranks if layout == "contiguous" else 2 * ranks
    for first, last in pairwise(bounds) if per_document else [(0, bounds[-1])]:
        cuts = [first + cut for cut in near_equal_cuts(last - first, parts)]
        if move is not None:
            cuts = [_moved(cut, bounds, move) for cut in cuts]
        undivided = per_document and move is not None and {first, last}.issuperset(cuts)
        for part, (start, stop) in enumerate(pairwise(cuts)):
            rank = tokens.index(min(tokens)) if undivided else min(part, 2 * ranks - 1 - part)
            tokens[rank] += stop - start
            pieces[rank] += _documents_within(bounds, start, stop)
    return pieces


def _moved(cut: int, bounds: tuple[int, ...], move: Callable[[int, int], int]) -> int:
    document = bisect_right(bounds, cut) - 1
    start = bounds[document]
    return cut if start == cut else start + move(cut - start, bounds[document + 1] - start)


def _documents_within(bounds: tuple[int, ...], start: int, stop: int) -> list[Fragment]:
    """Non-empty fragments of the packed interval `[start, stop)`."""
    found = []
    document = bisect_right(bounds, start) - 1
    while start < stop:
        upto = min(stop, bounds[document + 1])
        if start < upto:
            found.append(Fragment(document, start - bounds[document], upto - start))
        start = upto
        document += 1
    return found
