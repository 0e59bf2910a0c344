"""Random small batches and partitions for the property tests of plans."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import strategies as st

from longdelta.plan import ALIGNS, LAYOUTS, Partition, partition


def _lengths(*long: int) -> st.SearchStrategy[list[int]]:
    short = st.integers(0, 9)  # empty, one token, shorter than a halo
    chunks = st.integers(10, 150)  # around the chunk size
    kinds = [short, chunks, st.sampled_from(long)] if long else [short, chunks]
    return st.lists(st.one_of(kinds), max_size=6)


FEW_TOKENS = _lengths()
"""For tests that look at every token."""
LENGTHS = _lengths(512, 513, 1024, 4095, 64 * 260, 64 * 300)
"""With documents of one segment and of several, under every rule."""
RANKS = st.integers(1, 5)
VALUE_HEADS = st.sampled_from([None, 2, 48])
"""No rule, the rule of short segments, the rule of long ones."""


def bounds_of(lengths: list[int]) -> list[int]:
    """cu_seqlens of document lengths."""
    return [0, *accumulate(lengths)]


@st.composite
def explicit_fragments(draw: st.DrawFn, lengths: list[int], ranks: int) -> list[list[tuple]]:
    """A random cover of the documents by (document, offset, length)."""
    fragments: list[list[tuple]] = [[] for _ in range(ranks)]
    for document, tokens in enumerate(lengths):
        cuts = draw(st.sets(st.integers(1, tokens - 1), max_size=5)) if tokens > 1 else set()
        edges = [0, *sorted(cuts), tokens] if tokens else [0]
        for start, stop in pairwise(edges):
            fragments[draw(st.integers(0, ranks - 1))].append((document, start, stop - start))
    return fragments


@st.composite
def partitions(draw: st.DrawFn, lengths: st.SearchStrategy[list[int]] = LENGTHS) -> Partition:
    """Any layout and alignment over a random batch, rows after the last boundary included."""
    tokens, ranks = draw(lengths), draw(RANKS)
    bounds = bounds_of(tokens)
    rows = bounds[-1] + draw(st.sampled_from([0, 0, 3]))
    layout = draw(st.sampled_from(LAYOUTS))
    if layout == "fragments":
        given = draw(explicit_fragments(tokens, ranks))
        return partition(bounds, ranks, layout, fragments=given, rows=rows)
    align = draw(st.sampled_from(ALIGNS))
    heads = draw(VALUE_HEADS)
    return partition(bounds, ranks, layout, align=align, num_v_heads=heads, rows=rows)


def owners(plan: Partition) -> dict[tuple[int, int], tuple[int, int]]:
    """(document, token) to (rank, local row), token by token."""
    found = {}
    for rank, pieces in enumerate(plan.fragments):
        row = 0
        for piece in pieces:
            for token in range(piece.offset, piece.stop):
                assert (piece.document, token) not in found
                found[piece.document, token] = (rank, row)
                row += 1
    return found
