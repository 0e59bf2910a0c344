"""States along documents: chains in order, rounds that respect it, summaries to fold."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from longdelta.plan import (
    Hop,
    Partition,
    chains,
    crossings,
    messages,
    partition,
    relay_rounds,
    summaries,
)

from .strategies import partitions

BOTH = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@given(partitions())
def test_chains_follow_each_document_from_rank_to_other_rank(plan: Partition) -> None:
    found = chains(plan)
    assert [chain.document for chain in found] == [
        document for document in range(plan.documents) if plan.document_tokens(document)
    ]
    for chain in found:
        token = 0
        for link in chain.links:
            piece = plan.fragments[link.rank][link.index]
            assert (piece.document, piece.offset) == (chain.document, token)
            assert piece.length == link.length > 0
            token += link.length
        assert token == plan.document_tokens(chain.document)
        assert all(left.rank != right.rank for left, right in pairwise(chain.links))


@BOTH
@given(plan=partitions())
def test_relay_carries_each_crossing_once_after_the_one_before(
    plan: Partition, backward: bool
) -> None:
    done: set[tuple[int, int]] = set()
    last = {chain.document: len(chain.links) - 2 for chain in chains(plan)}
    everything = []
    for hops in relay_rounds(plan, backward=backward):
        assert hops
        for hop in hops:
            ahead = hop.position + 1 if backward else hop.position - 1
            if 0 <= ahead <= last[hop.document]:
                assert (hop.document, ahead) in done
        sent = [hop for message in messages(hops) for hop in message.hops]
        assert sorted(sent) == sorted(hops)
        pairs = [(message.source, message.target) for message in messages(hops)]
        assert pairs == sorted(set(pairs))
        done |= {(hop.document, hop.position) for hop in hops}
        everything += hops
    assert tuple(sorted(everything)) == crossings(plan, backward=backward)


@given(partitions())
def test_backward_hops_are_the_forward_ones_turned_round(plan: Partition) -> None:
    turned = [Hop(h.document, h.position, h.target, h.source) for h in crossings(plan)]
    assert tuple(turned) == crossings(plan, backward=True)
    assert len(relay_rounds(plan)) == len(relay_rounds(plan, backward=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_relay_takes_as_many_rounds_as_one_document_has_neighbours(ranks: int) -> None:
    assert len(relay_rounds(partition([0, 64], ranks))) == ranks - 1
    assert len(relay_rounds(partition([0, 64], ranks, "zigzag"))) == 2 * ranks - 2


def test_relay_moves_documents_side_by_side_in_one_round() -> None:
    plan = partition([0, 6, 10], 4, "zigzag_per_document")  # ranks 0 1 2 3 2 and 0 1 2 3
    rounds = relay_rounds(plan)
    assert [[(h.document, h.source, h.target) for h in hops] for hops in rounds] == [
        [(0, 0, 1), (1, 0, 1)],
        [(0, 1, 2), (1, 1, 2)],
        [(0, 2, 3), (1, 2, 3)],
        [(0, 3, 2)],
    ]
    assert [len(hops) for hops in relay_rounds(plan, backward=True)] == [2, 2, 2, 1]


def test_relay_stacks_the_states_of_one_pair_by_document() -> None:
    plan = partition([0, 4, 8], 2, "zigzag_per_document")
    (message,) = messages(relay_rounds(plan)[0])
    assert (message.source, message.target) == (0, 1)
    assert [hop.document for hop in message.hops] == [0, 1]


@BOTH
@given(plan=partitions())
def test_summaries_give_each_entering_fragment_all_before_it_in_order(
    plan: Partition, backward: bool
) -> None:
    fast = summaries(plan, backward=backward)
    published = {
        (rank, place): (slot.document, slot.position)
        for rank, slots in enumerate(fast.slots)
        for place, slot in enumerate(slots)
    }
    assert fast.slot_count == max(len(slots) for slots in fast.slots)
    entered = {}
    for rank, entries in enumerate(fast.entries):
        assert [entry.index for entry in entries] == sorted({entry.index for entry in entries})
        for entry in entries:
            assert entry.rank == rank
            assert plan.fragments[rank][entry.index].document == entry.document
            entered[entry.document, entry.position] = [published[p] for p in entry.predecessors]
    expected = {}
    for chain in chains(plan):
        order = list(range(len(chain.links)))[:: -1 if backward else 1]
        for count, position in enumerate(order[1:], start=1):
            expected[chain.document, position] = [(chain.document, at) for at in order[:count]]
    assert entered == expected
    assert fast.state_only == all(len(before) == 1 for before in expected.values())


def test_two_contiguous_ranks_need_no_transition() -> None:
    assert summaries(partition([0, 3, 64], 2)).state_only
    assert not summaries(partition([0, 3, 64], 2, "zigzag_per_document")).state_only
