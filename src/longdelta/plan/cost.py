"""Bytes that a call needs: saved, workspace, and every collective.

Note [Bytes on the wire]: `sent` is what a rank hands to a collective for others, counted once, and
`received` what comes from others. So an all-gather of n bytes a rank sends n and receives
(ranks - 1) n, and rows that stay on their rank count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from longdelta.errors import InvalidInput
from longdelta.plan.chains import messages, relay_rounds, summaries
from longdelta.plan.chunks import Walk, walk
from longdelta.plan.flops import ITEMSIZE, Heads
from longdelta.plan.halo import halo
from longdelta.plan.partition import Partition, partition
from longdelta.plan.tensors import SAVE_MODES, Counts, itemsize, saved_bytes, workspace_bytes

DIRECTIONS = ("forward", "backward")
BACKENDS = ("eager", "gluon")


@runtime_checkable
class SupportsTolist(Protocol):
    """A tensor or an array."""

    def tolist(self) -> list[int]:
        """The numbers."""


@dataclass(frozen=True)
class Collective:
    """One collective call of one rank, in bytes: Note [Bytes on the wire].

    name: `relay` (one per round, `step` counts them), `summaries` or `halo`.
    """

    name: str
    direction: str
    step: int
    sent: int
    received: int


@dataclass(frozen=True)
class Bytes:
    """Bytes that one rank needs for one layer.

    Attributes:
        saved: kept from the forward to the backward, besides the inputs.
        workspace_forward, workspace_backward: stage tensors that live only during a pass.
        collectives: every collective of both directions, in the order of the calls; equal names and
            steps on every rank.
    """

    saved: int
    workspace_forward: int
    workspace_backward: int
    collectives: tuple[Collective, ...]

    def sent(self, direction: str) -> int:
        """Bytes sent in `forward` or `backward`."""
        return sum(each.sent for each in self.collectives if each.direction == direction)

    def received(self, direction: str) -> int:
        """Bytes received in `forward` or `backward`."""
        return sum(each.received for each in self.collectives if each.direction == direction)


def bytes_needed(
    cu_seqlens: Sequence[int] | SupportsTolist,
    *,
    num_heads: int,
    num_v_heads: int,
    head_k_dim: int = 128,
    head_v_dim: int = 128,
    dtype: object = "bfloat16",
    save: str = "light",
    backend: str = "eager",
    ranks: int = 1,
    rank: int = 0,
    layout: str = "contiguous",
    align: str = "token",
    fragments: Sequence[Sequence[Sequence[int]]] | None = None,
    rows: int | None = None,
    deterministic: bool = True,
    conv1d_kernel_size: int | None = None,
    conv_channels: int | None = None,
) -> Bytes:
    """Bytes that a call needs on one rank besides its inputs and outputs: exact integers.

    Args:
        cu_seqlens: `[N + 1]` document boundaries in tokens, ints or a tensor; a batch of B sequences of T tokens is
            `[0, T, 2 T, ...]`.
        num_heads, num_v_heads: q/k heads H and value heads HV, a multiple of H.
        head_k_dim, head_v_dim: K and V.
        dtype: of q, k and v: float64, float32, bfloat16 or float16, by name or torch's.
        save: `none`, `light`, `full`, or `auto`: `light`, as where a gradient is required.
        backend: `eager` or `gluon`, whose stage tensors differ in dtype.
        ranks, layout, align, fragments, rows: the partition, as in `longdelta.plan.partition`.
        rank: whose bytes.
        deterministic: states cross by the relay; else by one all-gather of summaries where a
            document has fragments on three ranks or more.
        conv1d_kernel_size: rows that the short convolution reads; None: no convolution.
        conv_channels: its channels, by default those of q, k and v: 2 H K + HV V.

    Raises:
        InvalidInput: an argument is out of range.

    >>> need = bytes_needed([0, 8192], num_heads=2, num_v_heads=6, ranks=2, conv1d_kernel_size=4)
    >>> for each in need.collectives:
    ...     print(each.name, each.direction, each.sent, each.received)
    halo forward 7680 0
    relay forward 393216 0
    relay backward 0 393216
    halo backward 0 15360
    """
    heads = Heads(num_heads, num_v_heads, head_k_dim, head_v_dim)
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, SupportsTolist) else cu_seqlens
    dtype = str(dtype).removeprefix("torch.")
    save = "light" if save == "auto" else save
    _check(heads, dtype, save, ranks, rank)
    if backend not in BACKENDS:
        raise InvalidInput(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    held = partition(
        bounds,
        ranks,
        layout,
        align=align,
        num_v_heads=num_v_heads,
        fragments=fragments,
        rows=rows,
    )
    tables = rank_walk(held, rank, num_v_heads, deterministic)
    sizes = {"HV": heads.HV, "K": heads.K, "V": heads.V}
    forward, backward = workspace_bytes(
        Counts.of(tables), save=save, dtype=dtype, backend=backend, **sizes
    )
    saved = saved_bytes(
        save,
        T=held.local_rows(rank),
        N=len(held.fragments[rank]),
        dtype=dtype,
        backend=backend,
        edges=held.edges(rank),
        **sizes,
    )
    exchange = [
        state_collectives(held, rank, heads, deterministic, direction, itemsize("S_border", dtype))
        for direction in DIRECTIONS
    ]
    if conv1d_kernel_size is not None:
        channels = 2 * heads.H * heads.K + heads.HV * heads.V
        channels = channels if conv_channels is None else conv_channels
        ahead, back = halo_collectives(held, rank, conv1d_kernel_size, channels, dtype)
        exchange = [ahead + exchange[0], exchange[1] + back]
    return Bytes(saved, forward, backward, exchange[0] + exchange[1])


def rank_walk(held: Partition, rank: int, HV: int, deterministic: bool = True) -> Walk:
    """The walk of one rank of a partition.

    >>> rank_walk(partition([0, 8192], 2), 1, HV=6).borders
    8
    """
    return walk(
        held.cu_seqlens,
        HV,
        fragments=held.fragments[rank],
        rows=held.local_rows(rank),
        deterministic=deterministic,
    )


def state_collectives(
    held: Partition,
    rank: int,
    heads: Heads,
    deterministic: bool,
    direction: str,
    element_bytes: int = 4,
) -> tuple[Collective, ...]:
    """How states cross in one direction: relay rounds, or one all-gather of summaries.

    >>> state_collectives(partition([0, 9], 3), 0, Heads(1, 2), False, "forward")
    (Collective(name='summaries', direction='forward', step=0, sent=262144, received=524288),)
    """
    backward = direction == "backward"
    plan = summaries(held, backward=backward)
    if not plan.slot_count:
        return ()
    if not deterministic and not plan.state_only:
        slot = (heads.state_elements + heads.map_elements) * element_bytes
        sent = plan.slot_count * slot
        return (Collective("summaries", direction, 0, sent, sent * (held.ranks - 1)),)
    state = heads.state_elements * element_bytes
    found = []
    for step, hops in enumerate(relay_rounds(held, backward=backward)):
        sent = sum(len(each.hops) for each in messages(hops) if each.source == rank)
        received = sum(len(each.hops) for each in messages(hops) if each.target == rank)
        found.append(Collective("relay", direction, step, sent * state, received * state))
    return tuple(found)


def halo_collectives(
    held: Partition, rank: int, kernel_size: int, channels: int, dtype: str
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """The halo of the short convolution and its adjoint.

    Forward sends rows in their own dtype. The adjoint sends sums that other terms join, so they
    stay in float32 (float64 for float64).
    """
    plan = halo(held, kernel_size)
    if not any(plan.rows_sent(each) for each in range(held.ranks)):
        return (), ()
    out, into = plan.rows_sent(rank) * channels, plan.rows_received(rank) * channels
    row, sums = ITEMSIZE[dtype], max(4, ITEMSIZE[dtype])
    ahead = Collective("halo", "forward", 0, out * row, into * row)
    back = Collective("halo", "backward", 0, into * sums, out * sums)
    return (ahead,), (back,)


def _check(heads: Heads, dtype: str, save: str, ranks: int, rank: int) -> None:
    sizes = {
        "num_heads": heads.H,
        "num_v_heads": heads.HV,
        "head_k_dim": heads.K,
        "head_v_dim": heads.V,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InvalidInput(f"{name} must be at least 1, got {size}")
    if heads.HV % heads.H:
        raise InvalidInput(
            f"num_v_heads must be a multiple of num_heads = {heads.H}, got {heads.HV}"
        )
    if dtype not in ITEMSIZE:
        raise InvalidInput(f"dtype must be one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    if save not in SAVE_MODES:
        raise InvalidInput(f"save must be one of {', '.join(SAVE_MODES)}, got {save!r}")
    if not 0 <= rank < ranks:
        raise InvalidInput(f"rank must be in [0, {ranks}), got {rank}")
