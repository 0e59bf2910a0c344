"""Checks of what a caller hands to `partition`; every message names the entry at fault."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

from longdelta.errors import InvalidInput
from longdelta.plan.chunks import Fragment

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "balanced", "fragments")
ALIGNS = ("token", "segment")


@runtime_checkable
class SupportsTolist(Protocol):
    """A tensor or an array."""

    def tolist(self) -> list[int]:
        """The numbers."""


Integers = Sequence[int] | SupportsTolist


def checked_bounds(cu_seqlens: Integers) -> tuple[int, ...]:
    """The boundaries as a tuple of integers from 0 that never decrease."""
    given = _listed(cu_seqlens)
    bounds = [] if given is None else [_integer(bound) for bound in given]
    if not bounds or bounds[0] != 0 or None in bounds:
        shown = repr(cu_seqlens) if given is None else given[:3]
        raise InvalidInput(
            f"cu_seqlens must be integers that start at 0, got {shown}; use [0] for no document"
        )
    found = tuple(bound for bound in bounds if bound is not None)
    for at, (before, bound) in enumerate(pairwise(found)):
        if bound < before:
            raise InvalidInput(
                f"cu_seqlens must never decrease, got {before} then {bound} at position {at + 1}"
            )
    return found


def checked_rows(rows: int | None, tokens: int) -> int:
    """Packed rows, at least the tokens of the documents."""
    found = tokens if rows is None else _integer(rows)
    if found is None or found < tokens:
        raise InvalidInput(
            f"rows must be an integer of at least cu_seqlens[-1] = {tokens}, got {rows!r}; "
            "count every packed row"
        )
    return found


def check_options(layout: str, align: str, has_fragments: bool) -> None:
    """Raises if an option of `partition` is none of its names."""
    check_choice("layout", layout, LAYOUTS)
    check_choice("align", align, ALIGNS)
    if (layout == "fragments") != has_fragments:
        raise InvalidInput(
            f'fragments must be given with layout="fragments" and only then, got layout={layout!r} '
            f"{'with' if has_fragments else 'without'} fragments"
        )


def given_pieces(
    bounds: tuple[int, ...], ranks: int, fragments: Sequence[Sequence[Sequence[int]]]
) -> list[list[Fragment]]:
    """Explicit (document, offset, length) triples as fragments, once they cover every token."""
    listed = _listed(fragments)
    if listed is None or len(listed) != ranks:
        raise InvalidInput(
            f"fragments must hold one list per rank ({ranks}), "
            f"got {fragments if listed is None else len(listed)!r}; "
            "give an empty list to a rank without tokens"
        )
    pieces = [_pieces_of(rank, triples) for rank, triples in enumerate(listed)]
    check_cover(bounds, pieces)
    return pieces


def _pieces_of(rank: int, triples: object) -> list[Fragment]:
    held = _listed(triples)
    if held is None:
        raise InvalidInput(f"fragments[{rank}] must be a list of triples, got {triples!r}")
    pieces = []
    for at, triple in enumerate(held):
        numbers = [_integer(number) for number in _listed(triple) or ()]
        if len(numbers) != 3 or None in numbers:
            raise InvalidInput(
                f"fragments[{rank}][{at}] must be (document, offset, length), got {triple!r}"
            )
        pieces.append(Fragment(*(number for number in numbers if number is not None)))
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
    """An integer, numpy's and torch's included, that is not a bool."""
    return _integer(value) is not None


def checked_int(name: str, value: object, least: int) -> int:
    """The value as an integer of at least `least`.

    >>> checked_int("ranks", 2, least=1)
    2
    """
    found = _integer(value)
    if found is None or found < least:
        raise InvalidInput(f"{name} must be an integer of at least {least}, got {value!r}")
    return found


def checked_int_or_none(name: str, value: object, least: int) -> int | None:
    """As `checked_int`, where a value is given."""
    return None if value is None else checked_int(name, value, least)


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    """Raises unless the value is one of those known."""
    choices = tuple(known)
    if value not in choices:
        raise InvalidInput(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _integer(value: object) -> int | None:
    """The value as an int; None for a bool, a float and whatever else is no integer."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return None if isinstance(found, bool) or isinstance(value, bool) else int(found)


def _listed(values: Any) -> list[Any] | None:
    """What a sequence, an array or a tensor holds; None where it is none of these."""
    try:
        return list(values.tolist() if isinstance(values, SupportsTolist) else values)
    except (TypeError, RuntimeError):  # a meta tensor raises the latter
        return None
