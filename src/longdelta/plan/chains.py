"""How states travel along documents that several ranks hold.

Note [Crossings]: a crossing is where two neighbouring fragments of a document meet; they lie on
different ranks. Crossing i of a document lies between its fragments i and i + 1. Forward the state
S goes from the rank of fragment i to that of i + 1; backward its cotangent dS goes the other way.

Two ways across:
- the relay: the folded state itself goes from owner to owner. A hop waits for the hop before it, so
  documents advance side by side in rounds. This repeats one device's operations in order.
- summaries: every rank publishes (S_ext, M) of each fragment that a later one needs, in one
  all-gather, and folds its predecessors itself. One step, other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from longdelta.plan.partition import Partition


@dataclass(frozen=True)
class Link:
    """A non-empty fragment in its document's chain: who holds it, as which of its fragments."""

    rank: int
    index: int
    """Which of the rank's fragments, in local order."""
    offset: int
    length: int


@dataclass(frozen=True)
class Chain:
    """The fragments of one non-empty document, in document order."""

    document: int
    links: tuple[Link, ...]


@dataclass(frozen=True, order=True)
class Hop:
    """One state across one crossing, Note [Crossings]; `position` counts a document's crossings."""

    document: int
    position: int
    source: int
    target: int


@dataclass(frozen=True)
class Message:
    """All states that one rank sends another in a round, stacked in the order of `hops`."""

    source: int
    target: int
    hops: tuple[Hop, ...]


@dataclass(frozen=True)
class Slot:
    """A fragment that others need; its row in its rank's part is its place in `Summaries.slots`."""

    document: int
    position: int
    """Which link of the document's chain."""
    index: int
    """Which of the rank's fragments, in local order."""


@dataclass(frozen=True)
class Entry:
    """A fragment that a state enters, with the (rank, slot) to fold, in that order."""

    document: int
    position: int
    rank: int
    index: int
    predecessors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Summaries:
    """The fast exchange of one direction.

    Attributes:
        slots: per rank, what it publishes.
        slot_count: slots that every rank contributes, the missing ones as padding; 0: no exchange.
        entries: per rank, its fragments that a state enters.
        state_only: no document has a middle fragment, so that nothing reads a transition M: the
            relay, a single round here, then carries all there is and is used instead.
    """

    slots: tuple[tuple[Slot, ...], ...]
    slot_count: int
    entries: tuple[tuple[Entry, ...], ...]
    state_only: bool


def chains(partition: Partition) -> tuple[Chain, ...]:
    """One chain per non-empty document.

    >>> from longdelta.plan.partition import partition
    >>> [[(x.rank, x.length) for x in c.links] for c in chains(partition([0, 8], 2, "zigzag"))]
    [[(0, 2), (1, 4), (0, 2)]]
    """
    links: dict[int, list[Link]] = {}
    for rank, pieces in enumerate(partition.fragments):
        for index, piece in enumerate(pieces):
            if piece.length:
                link = Link(rank, index, piece.offset, piece.length)
                links.setdefault(piece.document, []).append(link)
    return tuple(
        Chain(document, tuple(sorted(links[document], key=lambda link: link.offset)))
        for document in sorted(links)
    )


def crossings(partition: Partition, *, backward: bool = False) -> tuple[Hop, ...]:
    """Every crossing of every document, by (document, position), as the hop it takes.

    >>> from longdelta.plan.partition import partition
    >>> crossings(partition([0, 8], 2), backward=True)
    (Hop(document=0, position=0, source=1, target=0),)
    """
    return tuple(hop for chain in chains(partition) for hop in _hops(chain, backward))


def relay_rounds(partition: Partition, *, backward: bool = False) -> tuple[tuple[Hop, ...], ...]:
    """Rounds of the relay: hops of one round are independent and each needs the round before.

    Forward, hop i of a document is in round i; backward, its last hop is in round 0. So W - 1
    rounds for contiguous layouts on W ranks and up to 2 W - 2 for zigzag.

    >>> from longdelta.plan.partition import partition
    >>> for hops in relay_rounds(partition([0, 4, 16], 2, "zigzag")):
    ...     print([(hop.document, hop.source, hop.target) for hop in hops])
    [(1, 1, 0)]
    >>> [len(hops) for hops in relay_rounds(partition([0, 16], 4, "zigzag"))]
    [1, 1, 1, 1, 1, 1]
    """
    rounds: list[list[Hop]] = []
    for chain in chains(partition):
        for step, hop in enumerate(_hops(chain, backward)[:: -1 if backward else 1]):
            if step == len(rounds):
                rounds.append([])
            rounds[step].append(hop)
    return tuple(tuple(hops) for hops in rounds)


def messages(hops: tuple[Hop, ...]) -> tuple[Message, ...]:
    """The messages of one round, one per (source, target), in that order.

    >>> for message in messages((Hop(0, 0, 1, 2), Hop(1, 0, 0, 1), Hop(4, 0, 1, 2))):
    ...     print(message.source, message.target, [hop.document for hop in message.hops])
    0 1 [1]
    1 2 [0, 4]
    """
    pairs: dict[tuple[int, int], list[Hop]] = {}
    for hop in sorted(hops):
        pairs.setdefault((hop.source, hop.target), []).append(hop)
    return tuple(Message(*pair, tuple(pairs[pair])) for pair in sorted(pairs))


def summaries(partition: Partition, *, backward: bool = False) -> Summaries:
    """Slots to publish and, per entering fragment, the predecessors to fold.

    Forward a fragment with a successor publishes, and a fragment folds its document's first
    fragment first, whose S_ext is walked from the initial state and whose M nobody reads.
    Backward is the mirror image.

    >>> from longdelta.plan.partition import partition
    >>> plan = summaries(partition([0, 9], 3))
    >>> plan.slot_count, plan.state_only, plan.entries[2][0].predecessors
    (1, False, ((0, 0), (1, 0)))
    """
    slots: list[list[Slot]] = [[] for _ in range(partition.ranks)]
    entries: list[list[Entry]] = [[] for _ in range(partition.ranks)]
    longest = 0
    for chain in chains(partition):
        last = len(chain.links) - 1
        longest = max(longest, last)
        published: list[tuple[int, int]] = []
        order = range(last, -1, -1) if backward else range(last + 1)
        for position in order:
            link = chain.links[position]
            if published:
                entry = Entry(chain.document, position, link.rank, link.index, tuple(published))
                entries[link.rank].append(entry)
            if position != order[-1]:
                published.append((link.rank, len(slots[link.rank])))
                slots[link.rank].append(Slot(chain.document, position, link.index))
    return Summaries(
        slots=tuple(tuple(held) for held in slots),
        slot_count=max(len(held) for held in slots),
        entries=tuple(tuple(sorted(held, key=lambda entry: entry.index)) for held in entries),
        state_only=longest <= 1,
    )


def _hops(chain: Chain, backward: bool) -> tuple[Hop, ...]:
    ranks = [(a.rank, b.rank) for a, b in pairwise(chain.links)]
    return tuple(
        Hop(chain.document, position, *(pair[::-1] if backward else pair))
        for position, pair in enumerate(ranks)
    )
