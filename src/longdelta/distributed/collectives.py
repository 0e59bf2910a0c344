"""Everything that is sent. The only file that calls torch.distributed.

Each exchange has a name ("relay", "summaries", "halo", "shard", "unshard", "agree") and counts the
bytes that leave and reach this rank; `recording` shows them. Ranks are ranks of the group.

Note [Tags]: a message carries a number made from the plan, so that on gloo two ranks with different
plans never take each other's tensors: the receive ends with the group's timeout. (NCCL has no tags;
building a context compares the plans on any backend.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longdelta.errors import InvalidInput

Group = dist.ProcessGroup
Mesh = DeviceMesh
_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # exported, though not by its stub


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


def serve() -> Any:
    """Where the processes of this machine find each other: at its free `port`, while it lives."""
    return _TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def start(backend: str, rank: int, ranks: int, port: int, seconds: float) -> Group:
    """Joins the default group of all processes that know the port of `serve`.

    seconds: how long a message may take before it is an error.
    """
    limit = timedelta(seconds=seconds)
    store = _TCPStore("localhost", port, is_master=False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def stop() -> None:
    """Leaves the default group, and with it every other."""
    dist.destroy_process_group()


def new_group(members: Sequence[int], seconds: float) -> Group:
    """A group of these ranks of the default group, all of which must ask for it, in equal order."""
    group: Group = dist.new_group(list(members), timeout=timedelta(seconds=seconds))
    return group


def destroy(group: Group) -> None:
    """Destroys one group."""
    dist.destroy_process_group(group)


def group_of(group: Group | DeviceMesh | None) -> Group | None:
    """The group itself, the default one for None, or None where nothing is initialised."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidInput(
                f"group must be a process group or a mesh of one dimension, got {group.ndim}; pass "
                'mesh.get_group("cp")'
            )
        return group.get_group()
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


def members(group: Group | None) -> list[int]:
    """Ranks of the default group that form this one; [0] without one."""
    return [0] if group is None else list(dist.get_process_group_ranks(group))


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


def all_to_all(
    name: str, x: Tensor, sent: Sequence[int], came: Sequence[int], group: Group
) -> Tensor:
    """One exchange of everything: `sent[r]` rows of x go to rank r, `came[r]` rows come from it."""
    result = x.new_empty(sum(came), *x.shape[1:])
    with torch.profiler.record_function(f"longdelta::{name}"):
        dist.all_to_all_single(result, x.contiguous(), list(came), list(sent), group=group)
    rank = dist.get_rank(group)
    stays = sent[rank] * (_bytes(x) // max(1, x.shape[0]))
    _note(name, _bytes(x) - stays, _bytes(result) - stays)
    return result


def barrier(group: Group | None) -> None:
    """Returns once every rank of the group is here; at once without a group."""
    if group is not None:
        dist.barrier(group)


def highest(value: float, group: Group | None) -> float:
    """The greatest of all ranks' numbers, on every rank."""
    if group is None:
        return value
    found = torch.tensor([value], dtype=torch.float64, device=carrier(group))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found.item())


def join() -> tuple[Group | None, int]:
    """The group of all processes that torchrun started, and this one's number on its machine.

    (None, 0) in a process that torchrun did not start. NCCL where there are GPUs, else gloo.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return None, 0
    local = dist.get_node_local_rank(fallback_rank=0)
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.group.WORLD, local


def leave(group: Group | None) -> None:
    """Ends what `join` began."""
    if group is not None:
        dist.destroy_process_group()
