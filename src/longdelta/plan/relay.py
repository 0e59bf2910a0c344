"""What one rank does for states to cross: which borders it sends, receives and folds, and when.

Borders and segments are those of the rank's `Walk`; a chain is a run of segments with maps (see
`Walk.chains`), which can be folded once the state at its entering border is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from longdelta.plan.chains import Summaries, chains, messages, relay_rounds, summaries
from longdelta.plan.chunks import Walk
from longdelta.plan.partition import Partition

Chains = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Parcel:
    """States that go to, or come from, one peer in one message: rows of S_border, in order."""

    peer: int
    borders: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """One round of the relay on one rank; `chains` can be folded after it."""

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    chains: Chains


@dataclass(frozen=True)
class Relay:
    """The relay of one rank and direction; `chains` need nothing from other ranks."""

    chains: Chains
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Export:
    """A slot that this rank publishes: the border where its fragment's summary ends up.

    enter: border on the fragment's other side, -1 where the document ends there; chains: the
    fragment's segments with maps, to be composed.
    """

    border: int
    enter: int
    chains: Chains


@dataclass(frozen=True)
class Import:
    """A border of this rank and the (rank, slot) summaries to fold into its state, in order."""

    border: int
    predecessors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Gather:
    """The all-gather of summaries of one rank and direction."""

    slot_count: int
    exports: tuple[Export, ...]
    imports: tuple[Import, ...]


def relay(partition: Partition, rank: int, walk: Walk, *, backward: bool = False) -> Relay:
    """The rank's part of the relay.

    >>> from longdelta.plan.cost import rank_walk
    >>> from longdelta.plan.partition import partition
    >>> held = partition([0, 4096], 2, align="segment", num_v_heads=2)
    >>> r = relay(held, 1, rank_walk(held, 1, HV=2))
    >>> r.chains, r.rounds[0].receives, r.rounds[0].chains
    ((), (Parcel(peer=0, borders=(0,)),), ((0, 1, 2),))
    """
    offsets = {chain.document: chain.links for chain in chains(partition)}
    border = {at: index for index, at in enumerate(walk.border_at)}
    waiting = _waiting(walk, backward)
    rounds = []
    arriving: set[int] = set()
    for hops in relay_rounds(partition, backward=backward):
        sends, receives = [], []
        for message in messages(hops):
            if rank not in (message.source, message.target):
                continue
            rows = tuple(
                border[hop.document, offsets[hop.document][hop.position + 1].offset]
                for hop in message.hops
            )
            if message.source == rank:
                sends.append(Parcel(message.target, rows))
            else:
                receives.append(Parcel(message.source, rows))
        came = [row for parcel in receives for row in parcel.borders]
        arriving.update(came)
        ready = tuple(waiting[row] for row in came if row in waiting)
        rounds.append(Round(tuple(sends), tuple(receives), ready))
    free = tuple(chain for row, chain in waiting.items() if row not in arriving)
    return Relay(free, tuple(rounds))


def gather(partition: Partition, rank: int, walk: Walk, *, backward: bool = False) -> Gather:
    """The rank's part of the all-gather of summaries.

    >>> from longdelta.plan.cost import rank_walk
    >>> from longdelta.plan.partition import partition
    >>> held = partition([0, 4096], 4, align="segment", num_v_heads=2)
    >>> g = gather(held, 1, rank_walk(held, 1, HV=2))
    >>> g.exports, g.imports
    ((Export(border=2, enter=0, chains=((0, 1),)),), (Import(border=0, predecessors=((0, 0),)),))
    """
    plan: Summaries = summaries(partition, backward=backward)
    border = {at: index for index, at in enumerate(walk.border_at)}
    links = {chain.document: chain.links for chain in chains(partition)}
    ending = _waiting(walk, not backward)

    def sides(document: int, position: int) -> tuple[int, int]:
        """Borders where the state enters and leaves a fragment, in the direction's order."""
        link = links[document][position]
        left = border.get((document, link.offset), -1)
        right = border.get((document, link.offset + link.length), -1)
        return (right, left) if backward else (left, right)

    exports = []
    for slot in plan.slots[rank]:
        enter, leave = sides(slot.document, slot.position)
        held = (ending[leave],) if leave in ending else ()
        exports.append(Export(leave, enter, held))
    imports = tuple(
        Import(sides(entry.document, entry.position)[0], entry.predecessors)
        for entry in plan.entries[rank]
    )
    return Gather(plan.slot_count, tuple(exports), imports)


def _waiting(walk: Walk, backward: bool) -> dict[int, tuple[int, ...]]:
    """Each chain by the border that it enters through, in the direction's order."""
    if backward:
        return {walk.segments[chain[-1]].leave: chain for chain in walk.chains}
    return {walk.segments[chain[0]].enter: chain for chain in walk.chains}
