"""Checks of what a caller hands to `partition`; every message names the entry at fault."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from longdelta.errors import InvalidInput
from longdelta.plan.chunks import Fragment

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "balanced", "fragments")
ALIGNS = ("token", "segment")


def checked_bounds(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    """The boundaries as a tuple of integers from 0 that never decrease."""
    bounds = tuple(cu_seqlens)
    if not bounds or not all(is_int(bound) for bound in bounds) or bounds[0] != 0:
        raise InvalidInput(
            f"cu_seqlens must be integers that start at 0, got {list(bounds[:3])}; "
            "use [0] for no document"
        )
    for at, (before, bound) in enumerate(pairwise(bounds)):
        if bound < before:
            raise InvalidInput(
                f"cu_seqlens must never decrease, got {before} then {bound} at position {at + 1}"
            )
    return bounds


def check_options(
    ranks: int, layout: str, align: str, num_v_heads: int | None, has_fragments: bool
) -> None:
    """Raises if an option of `partition` is out of its range."""
    if not is_int(ranks) or ranks < 1:
        raise InvalidInput(f"ranks must be a positive integer, got {ranks!r}")
    if layout not in LAYOUTS:
        raise InvalidInput(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if align not in ALIGNS:
        raise InvalidInput(f"align must be one of {', '.join(ALIGNS)}, got {align!r}")
    if num_v_heads is not None and (not is_int(num_v_heads) or num_v_heads < 1):
        raise InvalidInput(f"num_v_heads must be a positive integer or None, got {num_v_heads!r}")
    if (layout == "fragments") != has_fragments:
        raise InvalidInput(
            f'fragments must be given with layout="fragments" and only then, got layout={layout!r} '
            f"{'with' if has_fragments else 'without'} fragments"
        )


def given_pieces(
    bounds: tuple[int, ...], ranks: int, fragments: Sequence[Sequence[Sequence[int]]]
) -> list[list[Fragment]]:
    """Explicit (document, offset, length) triples as fragments, once they cover every token."""
    if len(fragments) != ranks:
        raise InvalidInput(
            f"fragments must hold one list per rank ({ranks}), got {len(fragments)}; "
            "give an empty list to a rank without tokens"
        )
    pieces: list[list[Fragment]] = []
    for rank, triples in enumerate(fragments):
        for at, triple in enumerate(triples):
            if len(triple) != 3 or not all(is_int(number) for number in triple):
                raise InvalidInput(
                    f"fragments[{rank}][{at}] must be (document, offset, length), got {triple!r}"
                )
        pieces.append([Fragment(*triple) for triple in triples])
    check_cover(bounds, pieces)
    return pieces


def check_cover(bounds: Sequence[int], pieces: Sequence[Sequence[Fragment]]) -> None:
    """Every token once; names the entry at fault."""
    found: list[tuple[Fragment, str]] = []
    for rank, given in enumerate(pieces):
        for at, piece in enumerate(given):
            triple = (piece.document, piece.offset, piece.length)
            where = f"fragments[{rank}][{at}] = {triple}"
            if not 0 <= piece.document < len(bounds) - 1:
                raise InvalidInput(f"{where}: document must be in [0, {len(bounds) - 1})")
            tokens = bounds[piece.document + 1] - bounds[piece.document]
            shortest = 1 if tokens else 0
            if piece.offset < 0 or piece.length < shortest or piece.stop > tokens:
                raise InvalidInput(
                    f"{where} must be a non-empty part of the document's {tokens} tokens"
                )
            found.append((piece, where))
    found.sort(key=lambda entry: (entry[0].document, entry[0].offset))
    reached = [0] * (len(bounds) - 1)
    for piece, where in found:
        expected = reached[piece.document]
        if piece.offset != expected:
            what = "overlaps another fragment" if piece.offset < expected else "leaves a gap"
            raise InvalidInput(
                f"{where} {what}: document {piece.document} is covered up to {expected}"
            )
        reached[piece.document] += piece.length
    for document, upto in enumerate(reached):
        tokens = bounds[document + 1] - bounds[document]
        if upto != tokens:
            raise InvalidInput(
                f"fragments must cover each document once: of the {tokens} tokens of document "
                f"{document} they hold {upto}"
            )


def is_int(value: object) -> bool:
    """An integer that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
