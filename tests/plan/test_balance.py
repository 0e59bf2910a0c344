"""The balanced layout: near-equal chunks, short documents whole, few crossings."""

from __future__ import annotations

from hypothesis import given

from longdelta.plan import CHUNK, Partition, crossings, partition
from longdelta.plan.balance import SLACK_SHIFT, chunk_count

from .strategies import LENGTHS, RANKS, bounds_of


def _loads(plan: Partition) -> list[int]:
    return [sum(chunk_count(piece.length) for piece in held) for held in plan.fragments]


@given(LENGTHS, RANKS)
def test_balanced_keeps_every_rank_within_its_share_and_slack(
    lengths: list[int], ranks: int
) -> None:
    plan = partition(bounds_of(lengths), ranks, "balanced")
    share = -(-sum(map(chunk_count, lengths)) // ranks)
    assert max(_loads(plan)) <= share + (share >> SLACK_SHIFT)
    assert sum(_loads(plan)) == sum(map(chunk_count, lengths))  # so no cut splits a chunk
    cuts = [piece for held in plan.fragments for piece in held if piece.offset]
    assert all(piece.offset % CHUNK == 0 for piece in cuts)
    assert all(chunk_count(lengths[p.document]) > share >> SLACK_SHIFT for p in cuts)


@given(LENGTHS, RANKS)
def test_balanced_crosses_less_often_than_it_has_ranks_and_long_documents(
    lengths: list[int], ranks: int
) -> None:
    plan = partition(bounds_of(lengths), ranks, "balanced")
    whole = partition(bounds_of(lengths), ranks, "zigzag_per_document")
    assert len(crossings(plan)) <= len(crossings(whole))


def test_balanced_splits_only_the_long_document() -> None:
    plan = partition(bounds_of([64, 64 * 10, 64, 64]), 2, "balanced")
    assert [plan.rows_of(rank) for rank in range(2)] == [
        ((64, 64 + 64 * 7),),
        ((0, 64), (64 * 8, 64 * 13)),
    ]


def test_balanced_packs_whole_documents_where_they_fit() -> None:
    plan = partition(bounds_of([6400, 3840, 3840, 1280]), 2, "balanced")
    assert _loads(plan) == [120, 120]
    assert not crossings(plan)


def test_balanced_does_not_cut_for_less_than_the_slack() -> None:
    plan = partition(bounds_of([64 * 33, 64 * 35]), 2, "balanced")
    assert not crossings(plan)


def test_balanced_adds_no_piece_for_less_than_the_slack() -> None:
    plan = partition(bounds_of([64 * 206, 64 * 94]), 3, "balanced")  # a share of 100, a slack of 6
    assert _loads(plan) == [100, 106, 94]


def test_balanced_cuts_on_segment_borders_within_half_a_segment() -> None:
    lengths = [64 * 2000, 64 * 100, 700, 3]
    plan = partition(bounds_of(lengths), 4, "balanced", align="segment", num_v_heads=6)
    assert plan.keeps_contract(6)
    share = -(-sum(map(chunk_count, lengths)) // 4)
    longest_segment = 32
    assert max(_loads(plan)) <= share + (share >> SLACK_SHIFT) + longest_segment
    assert min(_loads(plan)) >= share - (share >> SLACK_SHIFT) - longest_segment
