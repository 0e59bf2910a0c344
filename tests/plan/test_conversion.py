"""Conversion between partitions against a look at every row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdelta.errors import InvalidInput
from longdelta.plan import LAYOUTS, conversion, partition

from .strategies import FEW_TOKENS, RANKS, bounds_of

REGULAR = st.sampled_from([layout for layout in LAYOUTS if layout != "fragments"])


@given(FEW_TOKENS, RANKS, REGULAR, REGULAR, st.integers(0, 3))
def test_conversion_moves_every_row_to_its_new_place(
    lengths: list[int], ranks: int, layout: str, other: str, tail: int
) -> None:
    bounds = bounds_of(lengths)
    old = partition(bounds, ranks, layout, rows=bounds[-1] + tail)
    new = partition(bounds, ranks, other, rows=bounds[-1] + tail)
    here = [[row for span in old.rows_of(rank) for row in range(*span)] for rank in range(ranks)]
    moved: list[dict[int, int]] = [{} for _ in range(ranks)]
    moves = conversion(old, new)
    for move in moves:
        for at in range(move.rows):
            moved[move.target][move.target_row + at] = here[move.source][move.source_row + at]
    for rank in range(ranks):
        expected = [row for span in new.rows_of(rank) for row in range(*span)]
        assert [moved[rank][at] for at in range(len(expected))] == expected
    assert sum(move.rows for move in moves) == old.rows
    assert sorted(
        (m.target, m.source, m.target_row, m.source_row, m.rows) for m in moves
    ) == sorted(
        (m.source, m.target, m.source_row, m.target_row, m.rows) for m in conversion(new, old)
    )


def test_conversion_refuses_partitions_of_other_batches() -> None:
    with pytest.raises(InvalidInput, match="must have the same cu_seqlens"):
        conversion(partition([0, 4], 2), partition([0, 5], 2))
    with pytest.raises(InvalidInput, match="must have the same ranks, got 2 and 3"):
        conversion(partition([0, 4], 2), partition([0, 4], 3))
