"""Plans: integers and frozen dataclasses that say who computes, holds and sends what. No torch."""

from longdelta.plan.chains import (
    Chain,
    Entry,
    Hop,
    Link,
    Message,
    Slot,
    Summaries,
    chains,
    crossings,
    messages,
    relay_rounds,
    summaries,
)
from longdelta.plan.checks import ALIGNS, LAYOUTS
from longdelta.plan.chunks import CHUNK, Fragment, Segment, Walk, segment_borders, walk
from longdelta.plan.conversion import Move, conversion
from longdelta.plan.cost import Bytes, Collective, bytes_needed, rank_walk
from longdelta.plan.flops import Heads, StageCost, stage_costs
from longdelta.plan.halo import Halo, HaloMessage, halo
from longdelta.plan.partition import Partition, partition

__all__ = [
    "ALIGNS",
    "CHUNK",
    "LAYOUTS",
    "Bytes",
    "Chain",
    "Collective",
    "Entry",
    "Fragment",
    "Halo",
    "HaloMessage",
    "Heads",
    "Hop",
    "Link",
    "Message",
    "Move",
    "Partition",
    "Segment",
    "Slot",
    "StageCost",
    "Summaries",
    "Walk",
    "bytes_needed",
    "chains",
    "conversion",
    "crossings",
    "halo",
    "messages",
    "partition",
    "rank_walk",
    "relay_rounds",
    "segment_borders",
    "stage_costs",
    "summaries",
    "walk",
]
