"""Everything that is sent. The only file that calls torch.distributed.

Each exchange has a name ("relay", "summaries", "halo", "shard", "agree") and counts the bytes that
leave and reach this rank; `recording` shows them. Ranks are ranks of the group.

Note [Tags]: a message carries a number made from the plan, so that on gloo two ranks with different
plans never take each other's tensors: the receive ends with the group's timeout. (NCCL has no tags;
building a context compares the plans on any backend.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longdelta.errors import InvalidInput

Group = dist.ProcessGroup


@dataclass(frozen=True)
class Sent:
    """One exchange of this rank, in bytes; what stays on the rank counts nowhere."""

    name: str
    sent: int
    received: int


_logs: list[list[Sent]] = []


@contextmanager
def recording() -> Iterator[list[Sent]]:
    """Lists every exchange of this process inside the block."""
    log: list[Sent] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def _note(name: str, sent: int, received: int) -> None:
    for log in _logs:
        log.append(Sent(name, sent, received))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def group_of(group: Group | None) -> Group | None:
    """The group itself, the default one for None, or None where nothing is initialised."""
    if group is not None:
        return group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def place_in(group: Group | None) -> tuple[int, int]:
    """(rank, ranks) in the group; (0, 1) without one."""
    if group is None:
        return 0, 1
    try:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    except (ValueError, RuntimeError) as error:
        raise InvalidInput(
            f"group must be an initialised process group that this process belongs to; {error}. "
            "Was it destroyed? Build the context again with a live group"
        ) from error
    if rank < 0:
        raise InvalidInput("group must contain this process; pass the group that this rank is in")
    return rank, ranks


def carrier(group: Group) -> torch.device:
    """Device of the tensors that the group's backend carries."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def exchange(
    name: str,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    group: Group,
    tag: int,
) -> None:
    """Contiguous tensors to and from peers, one message per peer and direction; Note [Tags]."""
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=peer, tag=tag) for peer, x in sends
    ]
    operations += [
        dist.P2POp(dist.irecv, x, group=group, group_peer=peer, tag=tag) for peer, x in receives
    ]
    with torch.profiler.record_function(f"longdelta::{name}"):
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
    _note(name, sum(_bytes(x) for _, x in sends), sum(_bytes(x) for _, x in receives))


def all_gather(name: str, x: Tensor, group: Group) -> Tensor:
    """[ranks, ...] of equal tensors, by rank."""
    ranks = dist.get_world_size(group)
    parts = [torch.empty_like(x) for _ in range(ranks)]
    with torch.profiler.record_function(f"longdelta::{name}"):
        dist.all_gather(parts, x.contiguous(), group=group)
    _note(name, _bytes(x), _bytes(x) * (ranks - 1))
    return torch.stack(parts)


def agree(digest: bytes, group: Group) -> list[int]:
    """Ranks whose digest differs from this rank's; the same question on every rank."""
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=carrier(group))
    everyone = all_gather("agree", mine, group)
    return (everyone != mine).any(dim=1).nonzero().flatten().tolist()
