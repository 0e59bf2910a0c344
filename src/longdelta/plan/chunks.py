"""Documents into chunks, segments and borders: the tables one rank walks.

Note [Grid]: chunks of 64 tokens and segments lie on a grid that starts at each document's first
token, so that they depend on the document alone, not on what it is packed with or where it is cut.

Note [Borders]: a border is where two neighbouring segments of a document meet. One state S crosses
it forward and one cotangent dS backward. `summarize` writes a segment's S_ext into the row of the
border it leaves through, and `fold` turns that row into S in place: S[leave] += M S[enter].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from longdelta.plan.span import span

CHUNK = 64
"""Tokens of a chunk. Part of the numeric contract, as are the segment lengths below."""

FORGOTTEN = -20.0
"""Natural log of the bound of a transition below which it counts as zero: decision 0010."""

WALKS_AT_ONCE = 132
"""Walks (segment x value head) that keep a device busy: one for each SM of an H200."""

LONGEST_SEGMENT = 128
"""Chunks of the longest segment of a split document."""

_NO_SPLIT = 1 << 40
_WHOLE = 96
"""Chunks up to which a document is not split from 32 value heads on."""
_RARELY_ALONE = 16
"""Value heads from which documents of up to 64 chunks rarely come alone: segments of 8 chunks cost
a full batch more than they can win."""
_BORDERS, _BORDER = 10, 8
"""Chunks that a place walks in the time that borders add to a forward: any at all, and each that it
has a share of. docs/log.md, 2026-12-01, what the fast mode splits."""
_MANY = 32
"""Walks for each place from which on it takes longer to reckon how they fit than it is worth."""


@dataclass(frozen=True, order=True)
class Fragment:
    """Tokens `[offset, offset + length)` of one document."""

    document: int
    offset: int
    length: int

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Segment:
    """A run of chunks that one task walks. -1 stands for "none"; see Note [Borders]."""

    document: int
    first_chunk: int
    chunks: int
    enter: int
    """Border whose state it starts from; -1: the document starts here, from row `start`."""
    leave: int
    """Border it leaves through; -1: the document ends here, into row `end`."""
    start: int
    end: int
    map: int
    """Row of its transition M; only segments with both borders have one."""


def segment_chunks(document_tokens: int, HV: int | None, packed_tokens: int | None = None) -> int:
    """Chunks per segment of a document, by its length and HV alone (`HV=None`: for any HV), or, in
    the fast mode, by the tokens it is packed with too.

    The shortest power of two with chunks x HV <= WALKS_AT_ONCE x length, so that the walks fill a
    device about once: those of the one document, or in the fast mode of all; that mode leaves whole
    what would not outlast a balanced device by a sixteenth and what borders cost. At least 8
    chunks, 16 beyond 64 chunks or (deterministic) from 16 heads on, 32 beyond 128. docs/log.md,
    2026-11-30, segment lengths, and 2026-12-01, what the fast mode splits.

    >>> [segment_chunks(64 * chunks, HV=6) for chunks in (8, 100, 300, 1000, 9000)]
    [8, 16, 32, 64, 128]
    >>> segment_chunks(64 * 64, HV=16), segment_chunks(64 * 512, HV=32)
    (16, 128)
    >>> segment_chunks(64 * 96, HV=48) >= 96        # one segment: never split
    True
    >>> segment_chunks(8192, 32, 8192), segment_chunks(8192, 32, 4 * 8192) >= 128
    (32, True)
    """
    chunks = -(-document_tokens // CHUNK)
    if HV is None:
        return _NO_SPLIT if chunks <= LONGEST_SEGMENT else LONGEST_SEGMENT
    if packed_tokens is None:
        whole = HV >= 32 and chunks <= _WHOLE
        load = chunks * HV
    else:
        load = -(-packed_tokens // CHUNK) * HV
        whole = 16 * WALKS_AT_ONCE * (chunks - _BORDERS) <= 17 * load
    if whole:
        return _NO_SPLIT
    few = HV < _RARELY_ALONE or packed_tokens is not None
    length = 8 if chunks <= 64 and few else 16 if chunks <= 128 else 32
    while length < LONGEST_SEGMENT and load > length * WALKS_AT_ONCE:
        length *= 2
    return length


def segment_borders(document_tokens: int, HV: int | None) -> range:
    """Token offsets inside a document where its segments meet; see `segment_chunks`.

    >>> list(segment_borders(64 * 20 + 1, HV=6))
    [512, 1024]
    >>> list(segment_borders(512, HV=6)), list(segment_borders(0, HV=6))
    ([], [])
    """
    step = segment_chunks(document_tokens, HV) * CHUNK
    return range(step, document_tokens, step)


def _edges(
    fragment: Fragment, document_tokens: int, HV: int, packed_tokens: int | None
) -> list[int]:
    """Token offsets inside the document where the segments of a fragment begin and end."""
    step = segment_chunks(document_tokens, HV, packed_tokens) * CHUNK
    within = range(fragment.offset // step * step + step, fragment.stop, step)
    return [fragment.offset, *within, fragment.stop]


def packed_for_speed(
    fragments: Sequence[Fragment], document_tokens: Callable[[int], int], HV: int
) -> int | None:
    """What the fast mode cuts by where these fragments lie on one rank: the tokens of all, or each
    document's own (None), as the deterministic mode does, where walks so cut end sooner.

    >>> packed_for_speed([Fragment(0, 0, 2048)], [2048].__getitem__, HV=32)
    2048
    >>> lengths = [34000, 29000, 26000, 10000, 7000]      # 48 heads: whole, they leave gaps
    >>> pieces = [Fragment(n, 0, length) for n, length in enumerate(lengths)]
    >>> packed_for_speed(pieces, lengths.__getitem__, HV=48)
    """
    tokens = sum(fragment.length for fragment in fragments)

    def segments(packed_tokens: int | None) -> list[int]:
        result: list[int] = []
        for fragment in fragments:
            edges = _edges(fragment, document_tokens(fragment.document), HV, packed_tokens)
            result += [-(-right // CHUNK) - left // CHUNK for left, right in pairwise(edges)]
        return sorted(result, reverse=True)

    def end(segments: list[int]) -> float:
        # As many walks as this fill one another's gaps.
        many = len(segments) * HV > _MANY * WALKS_AT_ONCE
        share = -(-sum(segments) * HV // WALKS_AT_ONCE)
        walks = max(segments[0], share) if many else span(segments, HV, WALKS_AT_ONCE)
        borders = len(segments) - len(fragments)
        return walks + (_BORDERS + _BORDER * borders * HV / WALKS_AT_ONCE if borders else 0)

    packed, alone = segments(tokens), segments(None)
    return tokens if packed == alone or end(packed) <= end(alone) else None


@dataclass(frozen=True)
class Walk:
    """What one rank walks: its chunks, segments and borders, as plain integers.

    rows: rows of the packed tensors. documents: documents (or fragments) held. starts, ends: rows
    of initial_state and final_state. empty: (start, end) rows of documents without tokens, whose
    state passes through.
    """

    rows: int
    documents: int
    chunk_row: tuple[int, ...]
    chunk_length: tuple[int, ...]
    segments: tuple[Segment, ...]
    border_at: tuple[tuple[int, int], ...]
    """(document, token offset) of each border."""
    starts: int
    ends: int
    empty: tuple[tuple[int, int], ...]

    @property
    def chunks(self) -> int:
        return len(self.chunk_row)

    @property
    def borders(self) -> int:
        return len(self.border_at)

    @cached_property
    def maps(self) -> int:
        return sum(segment.map >= 0 for segment in self.segments)

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Runs of segments with a map, each entering where the one before left: what fold folds."""
        chains: list[list[int]] = []
        for index, segment in enumerate(self.segments):
            if segment.map < 0:
                continue
            before = self.segments[chains[-1][-1]] if chains else None
            if before is not None and before.leave == segment.enter:
                chains[-1].append(index)
            else:
                chains.append([index])
        return tuple(map(tuple, chains))

    @property
    def used_rows(self) -> int:
        """Rows that belong to a document; the rest are zero in every result."""
        return self.chunk_row[-1] + self.chunk_length[-1] if self.chunk_row else 0


def joined(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Neighbours of one document made one fragment.

    >>> joined([Fragment(0, 0, 5), Fragment(0, 5, 3), Fragment(1, 2, 2)])
    [Fragment(document=0, offset=0, length=8), Fragment(document=1, offset=2, length=2)]
    """
    result: list[Fragment] = []
    for fragment in fragments:
        last = result[-1] if result else None
        if last and (last.document, last.stop) == (fragment.document, fragment.offset):
            result[-1] = Fragment(last.document, last.offset, last.length + fragment.length)
        else:
            result.append(fragment)
    return result


def _on_grid(left: int, right: int) -> list[int]:
    """Lengths of the chunks of tokens [left, right) of a document: Note [Grid]."""
    cuts = [left, *range(left - left % CHUNK + CHUNK, right, CHUNK), right]
    return [stop - start for start, stop in pairwise(cuts)]


def walk(
    cu_seqlens: Sequence[int],
    HV: int,
    *,
    fragments: Sequence[Fragment] | None = None,
    rows: int | None = None,
    deterministic: bool = True,
) -> Walk:
    """The tables of the rank that holds `fragments` (default: every document, whole).

    rows: rows of its packed tensors, where more than its fragments have tokens.

    >>> w = walk([0, 65, 65, 66 + 64 * 16], HV=2)
    >>> w.chunks, w.borders, w.maps, w.empty
    (19, 2, 1, ((1, 1),))
    >>> [(s.document, s.chunks, s.enter, s.leave, s.map) for s in w.segments]
    [(0, 2, -1, -1, -1), (2, 8, -1, 0, -1), (2, 8, 0, 1, 0), (2, 1, 1, -1, -1)]
    >>> walk([0, 200], HV=2, fragments=[Fragment(0, 100, 100)]).chunk_length
    (28, 64, 8)
    """
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    if fragments is None:
        fragments = [Fragment(document, 0, length) for document, length in enumerate(lengths)]
    pieces = joined(fragments)
    packed_tokens = None if deterministic else packed_for_speed(pieces, lengths.__getitem__, HV)
    chunk_row: list[int] = []
    chunk_length: list[int] = []
    segments: list[Segment] = []
    borders: dict[tuple[int, int], int] = {}
    empty: list[tuple[int, int]] = []
    row = starts = ends = maps = 0
    for fragment in pieces:
        document, length = fragment.document, lengths[fragment.document]
        start = starts if fragment.offset == 0 else -1
        end = ends if fragment.stop == length else -1
        starts, ends = starts + (start >= 0), ends + (end >= 0)
        if not fragment.length:
            if not length:
                empty.append((start, end))
            continue
        for left, right in pairwise(_edges(fragment, length, HV, packed_tokens)):
            first_chunk = len(chunk_row)
            for length_of_chunk in _on_grid(left, right):
                chunk_row.append(row)
                chunk_length.append(length_of_chunk)
                row += length_of_chunk
            enter = borders.setdefault((document, left), len(borders)) if left else -1
            leave = borders.setdefault((document, right), len(borders)) if right < length else -1
            middle = enter >= 0 and leave >= 0
            segments.append(
                Segment(
                    document=document,
                    first_chunk=first_chunk,
                    chunks=len(chunk_row) - first_chunk,
                    enter=enter,
                    leave=leave,
                    start=start if enter < 0 else -1,
                    end=end if leave < 0 else -1,
                    map=maps if middle else -1,
                )
            )
            maps += middle
    return Walk(
        rows=row if rows is None else rows,
        documents=len(fragments),
        chunk_row=tuple(chunk_row),
        chunk_length=tuple(chunk_length),
        segments=tuple(segments),
        border_at=tuple(borders),
        starts=starts,
        ends=ends,
        empty=tuple(empty),
    )
