"""Schedules of one rank: run side by side they give every border its state once, in order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longdelta.plan import Partition, chains, crossings, partition
from longdelta.plan.chunks import Walk
from longdelta.plan.cost import rank_walk
from longdelta.plan.relay import Chains, gather, relay

from .strategies import partitions

BOTH = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
HEADS = st.sampled_from([2, 48])


class Rank:
    """Which borders of a rank hold their final state, and how often each chain was folded."""

    def __init__(self, walk: Walk, backward: bool) -> None:
        self.walk, self.backward = walk, backward
        self.folded: Counter[tuple[int, ...]] = Counter()
        # A document's first segment (backward: its last) leaves its state itself, not a summary.
        if backward:
            self.final = {s.enter for s in walk.segments if s.leave < 0 <= s.enter}
        else:
            self.final = {s.leave for s in walk.segments if s.enter < 0 <= s.leave}

    def fold(self, held: Chains) -> None:
        for chain in held:
            self.folded[chain] += 1
            for index in reversed(chain) if self.backward else chain:
                segment = self.walk.segments[index]
                given, made = segment.enter, segment.leave
                if self.backward:
                    given, made = made, given
                assert given in self.final
                assert made not in self.final
                self.final.add(made)


@BOTH
@given(plan=partitions(), heads=HEADS, deterministic=st.booleans())
def test_relay_gives_every_border_its_state_once_and_in_order(
    plan: Partition, heads: int, deterministic: bool, backward: bool
) -> None:
    walks = [rank_walk(plan, rank, heads, deterministic) for rank in range(plan.ranks)]
    relays = [relay(plan, rank, walks[rank], backward=backward) for rank in range(plan.ranks)]
    assert len({len(each.rounds) for each in relays}) == 1
    ranks = [Rank(walk, backward) for walk in walks]
    for rank, each in zip(ranks, relays, strict=True):
        rank.fold(each.chains)
    crossed: Counter[tuple[int, int]] = Counter()
    for step in range(len(relays[0].rounds)):
        arrivals = []
        for source, each in enumerate(relays):
            for parcel in each.rounds[step].sends:
                (back,) = (x for x in relays[parcel.peer].rounds[step].receives if x.peer == source)
                assert set(parcel.borders) <= ranks[source].final
                sent = [walks[source].border_at[row] for row in parcel.borders]
                assert sent == [walks[parcel.peer].border_at[row] for row in back.borders]
                crossed.update(sent)
                arrivals.append((parcel.peer, back.borders))
        for target, borders in arrivals:
            assert ranks[target].final.isdisjoint(borders)
            ranks[target].final |= set(borders)
        for rank, each in zip(ranks, relays, strict=True):
            rank.fold(each.rounds[step].chains)
    for rank in ranks:
        assert rank.final == set(range(rank.walk.borders))
        assert rank.folded == Counter(rank.walk.chains)
    starts = {chain.document: chain.links for chain in chains(plan)}
    assert crossed == Counter(
        (hop.document, starts[hop.document][hop.position + 1].offset) for hop in crossings(plan)
    )


@BOTH
@given(plan=partitions(), heads=HEADS)
def test_gather_composes_each_entering_state_of_all_tokens_before_it(
    plan: Partition, heads: int, backward: bool
) -> None:
    walks = [rank_walk(plan, rank, heads, deterministic=False) for rank in range(plan.ranks)]
    plans = [gather(plan, rank, walks[rank], backward=backward) for rank in range(plan.ranks)]
    assert len({each.slot_count for each in plans}) == 1

    def spans(rank: int, slot: int) -> tuple[int, int, int]:
        """(document, offset where a state enters, offset where it leaves)."""
        export = plans[rank].exports[slot]
        document, leaves = walks[rank].border_at[export.border]
        edge = plan.document_tokens(document) if backward else 0
        enters = walks[rank].border_at[export.enter][1] if export.enter >= 0 else edge
        # Its chains are the segments with maps between the two.
        segments = [walks[rank].segments[i] for chain in export.chains for i in chain]
        assert all(segment.document == document for segment in segments)
        return document, enters, leaves

    entered = set()
    for rank, each in enumerate(plans):
        assert len(each.exports) <= each.slot_count
        for entry in each.imports:
            document, offset = walks[rank].border_at[entry.border]
            at = plan.document_tokens(document) if backward else 0
            for predecessor in entry.predecessors:
                held, enters, leaves = spans(*predecessor)
                assert (held, enters) == (document, at)
                at = leaves
            assert at == offset
            entered.add((document, offset))
    assert len(entered) == len(crossings(plan))


def test_relay_of_one_rank_folds_everything_at_once() -> None:
    held = partition([0, 4096], 1)
    walk = rank_walk(held, 0, HV=2)
    assert relay(held, 0, walk).rounds == ()
    assert relay(held, 0, walk).chains == walk.chains
    assert gather(held, 0, walk).slot_count == 0
