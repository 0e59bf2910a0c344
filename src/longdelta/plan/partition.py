"""Which rank holds which tokens of a packed batch.

A partition gives every token of every document to one rank, as fragments: runs of consecutive
tokens of one document. It is a value: equal arguments give an equal partition on every rank,
without a message.

Note [Joined fragments]: neighbouring fragments of a document on one rank are made one. Keeping them
apart would cost a summary and a cut, and now "the next fragment" is always on another rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from longdelta.errors import InvalidInput
from longdelta.plan.balance import balanced_pieces
from longdelta.plan.checks import (
    Integers,
    check_options,
    checked_bounds,
    checked_int,
    checked_int_or_none,
    checked_rows,
    given_pieces,
)
from longdelta.plan.chunks import Fragment, joined, segment_borders
from longdelta.plan.cuts import layout_pieces, snap


@dataclass(frozen=True)
class Partition:
    """Fragments of every rank; build one with `partition`.

    Attributes:
        cu_seqlens: `[N + 1]` document boundaries, in tokens of the packed stream.
        rows: packed rows in all; those after `cu_seqlens[-1]` belong to no document and lie on the
            last rank.
        layout, align, num_v_heads: how the cuts were chosen.
        fragments: per rank, its fragments in local order, which is (document, offset).

    >>> two = partition([0, 6, 10], 2)
    >>> two.fragments[0]
    (Fragment(document=0, offset=0, length=5),)
    >>> [two.tokens(rank) for rank in range(two.ranks)]
    [5, 5]
    """

    cu_seqlens: tuple[int, ...]
    rows: int
    layout: str
    align: str
    num_v_heads: int | None
    fragments: tuple[tuple[Fragment, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks, those without tokens included."""
        return len(self.fragments)

    @property
    def documents(self) -> int:
        """Number of documents, the empty ones included."""
        return len(self.cu_seqlens) - 1

    def document_tokens(self, document: int) -> int:
        """Length of one document over all ranks, in tokens."""
        return self.cu_seqlens[document + 1] - self.cu_seqlens[document]

    def tokens(self, rank: int) -> int:
        """Tokens of documents on one rank."""
        return sum(fragment.length for fragment in self.fragments[rank])

    def local_rows(self, rank: int) -> int:
        """Packed rows on one rank: its tokens and, on the last, the rows after the boundaries."""
        tail = self.rows - self.cu_seqlens[-1] if rank == self.ranks - 1 else 0
        return self.tokens(rank) + tail

    def local_cu_seqlens(self, rank: int) -> tuple[int, ...]:
        """Boundaries of one rank's fragments in its own packed rows.

        >>> partition([0, 6, 10], 2).local_cu_seqlens(1)
        (0, 1, 5)
        """
        bounds = [0]
        for fragment in self.fragments[rank]:
            bounds.append(bounds[-1] + fragment.length)
        return tuple(bounds)

    def starts(self, rank: int) -> tuple[int, ...]:
        """Documents that start on this rank, empty ones included: it owns their initial states.

        >>> partition([0, 6, 6, 10], 2).starts(1)
        (1, 2)
        """
        return tuple(piece.document for piece in self.fragments[rank] if piece.offset == 0)

    def ends(self, rank: int) -> tuple[int, ...]:
        """Documents that end on this rank, empty ones included: it owns their final states.

        >>> partition([0, 6, 6, 10], 2).ends(1)
        (0, 1, 2)
        """
        return tuple(
            piece.document
            for piece in self.fragments[rank]
            if piece.stop == self.document_tokens(piece.document)
        )

    def edges(self, rank: int) -> int:
        """How often a document of this rank goes on on another rank, before or after.

        >>> partition([0, 6, 10], 2).edges(0)
        1
        """
        return sum(
            (piece.offset > 0) + (piece.stop < self.document_tokens(piece.document))
            for piece in self.fragments[rank]
        )

    def rows_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Ranges `[start, stop)` of global packed rows in local order; neighbours are one range.

        >>> partition([0, 6, 10], 2, layout="zigzag").rows_of(0)
        ((0, 3), (8, 10))
        """
        ranges = [
            (self.cu_seqlens[piece.document] + piece.offset, piece.length)
            for piece in self.fragments[rank]
        ]
        if rank == self.ranks - 1:
            ranges.append((self.cu_seqlens[-1], self.rows - self.cu_seqlens[-1]))
        merged: list[tuple[int, int]] = []
        for start, length in ranges:
            if length == 0:
                continue
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], start + length)
            else:
                merged.append((start, start + length))
        return tuple(merged)

    def keeps_contract(self, num_v_heads: int | None = None) -> bool:
        """Whether every cut is a segment border for that many value heads (None: for any number).

        Only then does the deterministic mode give the bits of one device on these ranks.

        >>> partition([0, 6, 10], 2).keeps_contract(8)
        False
        """
        return self._cut_off_a_border(num_v_heads) is None

    def _cut_off_a_border(self, num_v_heads: int | None) -> tuple[int, int, int] | None:
        """First (rank, document, offset) of a cut that is no segment border."""
        for rank, pieces in enumerate(self.fragments):
            for piece in pieces:
                if piece.offset == 0:
                    continue
                tokens = self.document_tokens(piece.document)
                if piece.offset not in segment_borders(tokens, num_v_heads):
                    return rank, piece.document, piece.offset
        return None

    @cached_property
    def filled(self) -> int:
        """Number of documents that have tokens."""
        return sum(start < stop for start, stop in pairwise(self.cu_seqlens))

    def __hash__(self) -> int:
        # Of the digest, which is kept: `longdelta.plan.cost` looks plans up once per rank.
        return int(self._digest[:15], 16)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def digest(self) -> str:
        """Hex sha256 of the content, equal in every process: what ranks compare once."""
        return self._digest

    def to_json(self) -> str:
        """Canonical text; `from_json` gives an equal partition back.

        >>> Partition.from_json(partition([0, 6, 10], 2).to_json()) == partition([0, 6, 10], 2)
        True
        """
        content: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        content["fragments"] = [
            [[piece.document, piece.offset, piece.length] for piece in pieces]
            for pieces in self.fragments
        ]
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Partition:
        """The partition that `to_json` wrote.

        Raises:
            InvalidInput: the text is not what `to_json` writes, or says no partition.
        """
        try:
            content = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"text must be what to_json wrote, got no JSON: {error}") from None
        names = {field.name for field in fields(Partition)}
        if not isinstance(content, dict) or set(content) != names:
            held = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise InvalidInput(f"text must be what to_json wrote, with {sorted(names)}, got {held}")
        layout, align, pieces = content["layout"], content["align"], content["fragments"]
        if not isinstance(pieces, list) or not pieces:
            raise InvalidInput(f"fragments must hold one list per rank, got {pieces!r}")
        check_options(layout, align, has_fragments=layout == "fragments")
        bounds = checked_bounds(content["cu_seqlens"])
        heads = checked_int_or_none("num_v_heads", content["num_v_heads"], least=1)
        given = given_pieces(bounds, len(pieces), pieces)
        found = _built(bounds, content["rows"], layout, align, heads, given)
        if found.fragments != tuple(map(tuple, given)):
            raise InvalidInput("text must be what to_json wrote, got fragments in another order")
        return found

    def __str__(self) -> str:
        lines = [
            f"{self.layout} partition, {self.ranks} ranks, align={self.align}, "
            f"{self.documents} documents, {self.cu_seqlens[-1]} tokens, {self.rows} rows"
        ]
        for rank, pieces in enumerate(self.fragments):
            held = ", ".join(f"{piece.document}[{piece.offset}:{piece.stop}]" for piece in pieces)
            lines.append(f"  rank {rank:>3} {self.tokens(rank):>9} tokens  {held or '-'}")
        return "\n".join(lines)


def partition(
    cu_seqlens: Integers,
    ranks: int,
    layout: str = "contiguous",
    *,
    align: str = "token",
    num_v_heads: int | None = None,
    fragments: Sequence[Sequence[Sequence[int]]] | None = None,
    rows: int | None = None,
) -> Partition:
    """Give every token of a packed batch to one of the ranks.

    Args:
        cu_seqlens: `[N + 1]` document boundaries in tokens, from 0, never decreasing: ints, an
            array or a tensor.
        ranks: number of ranks; some may end up without tokens.
        layout: `contiguous`: near-equal intervals of the packed stream, one a rank.
            `zigzag`: twice as many; rank r holds the r-th and the r-th from the end.
            `zigzag_per_document`: the same within each document; with `align="segment"` one too
            short to cut goes whole to the rank with the fewest tokens so far.
            `balanced`: whole short documents, long ones split (`longdelta.plan.balance`).
            `fragments`: as given.
        align: `token` cuts anywhere; `segment` moves every cut inside a document to the nearest
            border of its segments, or to its ends, which keeps the bitwise guarantee of the
            deterministic mode.
        num_v_heads: value heads of the layers, which fix the segments; None: borders that serve
            any number.
        fragments: with `layout="fragments"`, per rank its (document, offset, length) triples, in
            tokens; together they cover each document once.
        rows: packed rows, at least `cu_seqlens[-1]` (the default); rows after the last boundary
            lie on the last rank.

    An empty document belongs to the rank of the token before it, else to rank 0, whether or not
    `fragments` lists it. Neighbours on one rank are joined: Note [Joined fragments].

    Raises:
        InvalidInput: an argument is out of range, fragments overlap, leave a gap or are cut off a
            border.

    >>> print(partition([0, 2049, 5050], 2, layout="zigzag"))
    zigzag partition, 2 ranks, align=token, 2 documents, 5050 tokens, 5050 rows
      rank   0      2525 tokens  0[0:1263], 1[1739:3001]
      rank   1      2525 tokens  0[1263:2049], 1[0:1739]
    >>> partition([0, 6], 2, layout="fragments", fragments=[[(0, 4, 2)], [(0, 0, 4)]]).rows_of(0)
    ((4, 6),)
    """
    bounds = checked_bounds(cu_seqlens)
    ranks = checked_int("ranks", ranks, least=1)
    check_options(layout, align, fragments is not None)
    num_v_heads = checked_int_or_none("num_v_heads", num_v_heads, least=1)
    if fragments is not None:
        pieces = given_pieces(bounds, ranks, fragments)
    elif layout == "balanced":
        pieces = [[] for _ in range(ranks)]
        lengths = [stop - start for start, stop in pairwise(bounds)]
        for rank, piece in balanced_pieces(lengths, ranks, align == "segment", num_v_heads):
            pieces[rank].append(piece)
    else:
        move = partial(snap, num_v_heads=num_v_heads) if align == "segment" else None
        pieces = layout_pieces(bounds, ranks, layout, move)
    return _built(bounds, rows, layout, align, num_v_heads, pieces)


def _built(
    bounds: tuple[int, ...],
    rows: int | None,
    layout: str,
    align: str,
    num_v_heads: int | None,
    pieces: list[list[Fragment]],
) -> Partition:
    """The partition of pieces that cover every token, once it keeps what `align` promises."""
    rows = checked_rows(rows, bounds[-1])
    result = Partition(bounds, rows, layout, align, num_v_heads, _canonical(bounds, pieces))
    off = result._cut_off_a_border(num_v_heads) if align == "segment" else None
    if off is not None:
        raise InvalidInput(
            f"fragments[{off[0]}] of document {off[1]} must start on a segment border "
            f'(num_v_heads={num_v_heads}) with align="segment", got offset {off[2]}; '
            'use an offset of segment_borders(...) or align="token"'
        )
    return result


def _canonical(
    bounds: tuple[int, ...], pieces: list[list[Fragment]]
) -> tuple[tuple[Fragment, ...], ...]:
    """Sorted, joined, and with the empty documents; see Note [Joined fragments]."""
    per_rank = [joined(sorted(piece for piece in given if piece.length)) for given in pieces]
    owner_of_end = {
        bounds[piece.document] + piece.stop: rank
        for rank, held in enumerate(per_rank)
        for piece in held
    }
    for document, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            per_rank[owner_of_end.get(start, 0)].append(Fragment(document, 0, 0))
    return tuple(tuple(sorted(held)) for held in per_rank)
