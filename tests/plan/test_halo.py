"""The halo of the short convolution against a look at every token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdelta.errors import InvalidInput
from longdelta.plan import Partition, halo, partition

from .strategies import FEW_TOKENS, owners, partitions


@given(partitions(FEW_TOKENS), st.integers(1, 6))
def test_halo_brings_the_rows_before_each_fragment(plan: Partition, kernel_size: int) -> None:
    found = halo(plan, kernel_size)
    token_at = {place: token for token, place in owners(plan).items()}
    buffers: list[dict[int, tuple[int, int]]] = [{} for _ in range(plan.ranks)]
    for message in found.messages:
        for row, place in zip(message.rows, message.places, strict=True):
            assert place not in buffers[message.target]
            buffers[message.target][place] = token_at[message.source, row]
    for rank, pieces in enumerate(plan.fragments):
        expected = [
            (piece.document, token)
            for piece in pieces
            for token in range(max(0, piece.offset - kernel_size + 1), piece.offset)
        ]
        assert [buffers[rank][place] for place in range(len(buffers[rank]))] == expected
        lengths = [min(kernel_size - 1, piece.offset) for piece in pieces]
        assert found.bounds[rank] == tuple(sum(lengths[:at]) for at in range(len(lengths) + 1))


@given(partitions(FEW_TOKENS), st.integers(1, 6))
def test_halo_counts_only_rows_that_change_rank(plan: Partition, kernel_size: int) -> None:
    found = halo(plan, kernel_size)
    owner = owners(plan)
    sent, received = [0] * plan.ranks, [0] * plan.ranks
    for rank, pieces in enumerate(plan.fragments):
        for piece in pieces:
            for token in range(max(0, piece.offset - kernel_size + 1), piece.offset):
                giver = owner[piece.document, token][0]
                sent[giver] += giver != rank
                received[rank] += giver != rank
    assert [found.rows_sent(rank) for rank in range(plan.ranks)] == sent
    assert [found.rows_received(rank) for rank in range(plan.ranks)] == received


def test_halo_comes_from_several_ranks_when_fragments_are_shorter_than_it() -> None:
    plan = partition([0, 4], 4)
    found = halo(plan, 4)
    to_last = [(each.source, each.rows, each.places) for each in found.messages if each.target == 3]
    assert to_last == [(0, (0,), (0,)), (1, (0,), (1,)), (2, (0,), (2,))]


def test_halo_copies_its_own_rows_when_they_lie_on_the_same_rank() -> None:
    pieces = [[(0, 0, 2), (0, 3, 2)], [(0, 2, 1)]]
    found = halo(partition([0, 5], 2, "fragments", fragments=pieces), 4)
    own = [(each.rows, each.places) for each in found.messages if each.source == each.target]
    assert own == [((0, 1), (0, 1))]
    assert found.rows_received(0) == 1


def test_halo_refuses_a_kernel_of_no_rows() -> None:
    for size in (0, 1.5, True):
        with pytest.raises(InvalidInput, match=f"kernel_size must be an integer .* got {size}"):
            halo(partition([0, 4], 2), size)
