"""Bytes that a call needs: saved, workspace, and every collective.

Note [Bytes on the wire]: `sent` is what a rank hands to a collective for others, counted once, and
`received` what comes from others. So an all-gather of n bytes a rank sends n and receives
(ranks - 1) n, and rows that stay on their rank count nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from longdelta.errors import InvalidInput
from longdelta.plan.chains import relay_rounds
from longdelta.plan.checks import Integers, check_choice, checked_int, checked_int_or_none
from longdelta.plan.chunks import CHUNK, Fragment, Walk, packed_for_speed, segment_chunks, walk
from longdelta.plan.flops import ITEMSIZE, Heads
from longdelta.plan.halo import Halo, halo
from longdelta.plan.partition import Partition, partition
from longdelta.plan.tensors import (
    ACTIVATED,
    SAVE_MODES,
    Counts,
    capacity,
    itemsize,
    saved_bytes,
    workspace_bytes,
)

DIRECTIONS = ("forward", "backward")
BACKENDS = ("eager", "gluon")


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
        saved: kept from the forward to the backward, besides the inputs; in a graph of
            `torch.compile`, which does not know where documents start, as much as for the worst
            packing of as many rows and documents.
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
    cu_seqlens: Integers,
    *,
    num_heads: int,
    num_v_heads: int,
    head_k_dim: int = 128,
    head_v_dim: int = 128,
    dtype: object = "bfloat16",
    save: str = "light",
    backend: str = "eager",
    activated: Sequence[str] = (),
    ranks: int = 1,
    rank: int = 0,
    layout: str = "contiguous",
    align: str = "token",
    fragments: Sequence[Sequence[Sequence[int]]] | None = None,
    rows: int | None = None,
    deterministic: bool = True,
    conv1d_kernel_size: int | None = None,
    conv_channels: int | None = None,
    compiled: bool = False,
) -> Bytes:
    """Bytes that a call needs on one rank besides its inputs and outputs: exact integers.

    Args:
        cu_seqlens: `[N + 1]` document boundaries in tokens, ints or a tensor; a batch of B
            sequences of T tokens is `[0, T, 2 T, ...]`.
        num_heads, num_v_heads: q/k heads H and value heads HV, a multiple of H.
        head_k_dim, head_v_dim: K and V.
        dtype: of q, k and v: float64, float32, bfloat16 or float16, by name or torch's.
        save: `none`, `light`, `full`, or `auto`: `light`, as where a gradient is required.
        backend: `eager` or `gluon`, whose stage tensors differ in dtype.
        activated: what the call itself makes ready: `q_unit` and `k_unit` with
            ``use_qk_l2norm_in_kernel``; `g`, `beta` where they come raw, strided or rounded.
        ranks, layout, align, fragments, rows: the partition, as in `longdelta.plan.partition`.
        rank: whose bytes.
        deterministic: states cross by the relay; else by one all-gather of summaries where a
            document has fragments on three ranks or more.
        conv1d_kernel_size: rows that the short convolution reads; None: no convolution.
        conv_channels: its channels, by default those of q, k and v: 2 H K + HV V.
        compiled: the call is part of a graph of `torch.compile`.

    Raises:
        InvalidInput: an argument is out of range, or the backend does not take dtype, K or V.

    >>> need = bytes_needed([0, 8192], num_heads=2, num_v_heads=6, ranks=2, conv1d_kernel_size=4)
    >>> for each in need.collectives:
    ...     print(each.name, each.direction, each.sent, each.received)
    halo forward 7680 0
    relay forward 393216 0
    relay backward 0 393216
    halo backward 0 15360
    """
    heads = Heads(
        checked_int("num_heads", num_heads, least=1),
        checked_int("num_v_heads", num_v_heads, least=1),
        checked_int("head_k_dim", head_k_dim, least=1),
        checked_int("head_v_dim", head_v_dim, least=1),
    )
    kernel_size = checked_int_or_none("conv1d_kernel_size", conv1d_kernel_size, least=1)
    channels = checked_int_or_none("conv_channels", conv_channels, least=1)
    ranks, rank = checked_int("ranks", ranks, least=1), checked_int("rank", rank, least=0)
    dtype = str(dtype).removeprefix("torch.")
    save = "light" if save == "auto" else save
    _check(heads, dtype, save, backend, deterministic, activated)
    if rank >= ranks:
        raise InvalidInput(f"rank must be in [0, {ranks}), got {rank}")
    held = partition(
        cu_seqlens,
        ranks,
        layout,
        align=align,
        num_v_heads=heads.HV,
        fragments=fragments,
        rows=rows,
    )
    return rank_bytes(
        held,
        rank,
        heads,
        dtype=dtype,
        save=save,
        backend=backend,
        activated=tuple(activated),
        deterministic=deterministic,
        conv1d_kernel_size=kernel_size,
        conv_channels=channels,
        compiled=compiled,
    )


def rank_bytes(
    held: Partition,
    rank: int,
    heads: Heads,
    *,
    dtype: str = "bfloat16",
    save: str = "light",
    backend: str = "eager",
    activated: tuple[str, ...] = (),
    deterministic: bool = True,
    conv1d_kernel_size: int | None = None,
    conv_channels: int | None = None,
    compiled: bool = False,
) -> Bytes:
    """`bytes_needed` of one rank of a partition, whose exchanges are planned once for all ranks.

    >>> need = rank_bytes(partition([0, 8192], 2), 0, Heads(2, 6))
    >>> need == bytes_needed([0, 8192], num_heads=2, num_v_heads=6, ranks=2)
    True
    """
    sizes = {"HV": heads.HV, "K": heads.K, "V": heads.V}
    counts = rank_counts(held, rank, heads.HV, deterministic)
    forward, backward = workspace_bytes(
        counts,
        save=save,
        dtype=dtype,
        backend=backend,
        activated=activated,
        T=held.local_rows(rank),
        H=heads.H,
        **sizes,
    )
    if compiled:
        rows, fragments = held.local_rows(rank), len(held.fragments[rank])
        counts = capacity(rows, fragments, heads.HV, held.edges(rank))
    saved = saved_bytes(save, counts, dtype=dtype, backend=backend, **sizes)
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
    4
    """
    return walk(
        held.cu_seqlens,
        HV,
        fragments=held.fragments[rank],
        rows=held.local_rows(rank),
        deterministic=deterministic,
    )


def rank_counts(held: Partition, rank: int, HV: int, deterministic: bool = True) -> Counts:
    """`Counts.of(rank_walk(...))` without the walk, whose tables grow with the tokens.

    >>> rank_counts(partition([0, 8192], 2), 1, HV=6)
    Counts(chunks=64, borders=4, maps=3)
    """
    chunks = borders = maps = 0
    for piece, segments in rank_segments(held, rank, HV, deterministic):
        ends = (piece.offset > 0) + (piece.stop < held.document_tokens(piece.document))
        chunks += -(-piece.stop // CHUNK) - piece.offset // CHUNK
        borders += segments - 1 + ends
        maps += max(segments - 2 + ends, 0)
    return Counts(chunks, borders, maps)


def rank_segments(
    held: Partition, rank: int, HV: int, deterministic: bool = True
) -> list[tuple[Fragment, int]]:
    """The fragments of a rank that have tokens, each with the number of its segments."""
    pieces = held.fragments[rank]
    packed_tokens = None
    if not deterministic:
        packed_tokens = packed_for_speed(pieces, held.document_tokens, HV)
    found = []
    for piece in pieces:
        if piece.length:
            tokens = held.document_tokens(piece.document)
            step = segment_chunks(tokens, HV, packed_tokens) * CHUNK
            cuts = (piece.stop - 1) // step - piece.offset // step
            found.append((piece, 1 + cuts))
    return found


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
    rounds, slot_count = _relay_states(held, backward)
    if not deterministic and len(rounds) > 1:  # else `Summaries.state_only`: the relay
        slot = (heads.state_elements + heads.map_elements) * element_bytes
        sent = slot_count * slot
        return (Collective("summaries", direction, 0, sent, sent * (held.ranks - 1)),)
    state = heads.state_elements * element_bytes
    return tuple(
        Collective("relay", direction, step, out[rank] * state, into[rank] * state)
        for step, (out, into) in enumerate(rounds)
    )


# The exchanges of a partition serve every rank: planned per rank, they cost ranks^2.
@lru_cache(maxsize=4)
def _relay_states(
    held: Partition, backward: bool
) -> tuple[tuple[tuple[Counter[int], Counter[int]], ...], int]:
    """Per round of the relay the states that leave and that reach each rank; and the slots of the
    summaries: every state that the relay sends is one that its sender would publish."""
    rounds = tuple(
        (Counter(hop.source for hop in hops), Counter(hop.target for hop in hops))
        for hops in relay_rounds(held, backward=backward)
    )
    slots: Counter[int] = sum((out for out, _ in rounds), Counter())
    return rounds, max(slots.values(), default=0)


@lru_cache(maxsize=4)
def _halo(held: Partition, kernel_size: int) -> Halo:
    return halo(held, kernel_size)


def halo_collectives(
    held: Partition, rank: int, kernel_size: int, channels: int, dtype: str
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """The halo of the short convolution and its adjoint.

    Forward sends rows in their own dtype. The adjoint sends sums that other terms join, so they
    stay in float32 (float64 for float64).
    """
    plan = _halo(held, kernel_size)
    if all(message.source == message.target for message in plan.messages):
        return (), ()
    out, into = plan.rows_sent(rank) * channels, plan.rows_received(rank) * channels
    row, sums = ITEMSIZE[dtype], max(4, ITEMSIZE[dtype])
    ahead = Collective("halo", "forward", 0, out * row, into * row)
    back = Collective("halo", "backward", 0, into * sums, out * sums)
    return (ahead,), (back,)


def _check(
    heads: Heads,
    dtype: str,
    save: str,
    backend: str,
    deterministic: bool,
    activated: Sequence[str],
) -> None:
    if heads.HV % heads.H:
        raise InvalidInput(
            f"num_v_heads must be a multiple of num_heads = {heads.H}, got {heads.HV}"
        )
    check_choice("dtype", dtype, ITEMSIZE)
    check_choice("save", save, SAVE_MODES)
    check_choice("backend", backend, BACKENDS)
    if backend == "gluon" and (dtype, heads.K, heads.V) != ("bfloat16", 128, 128):
        raise InvalidInput(
            "backend='gluon' takes dtype bfloat16 and head_k_dim = head_v_dim = 128; got "
            f"{dtype}, {heads.K} and {heads.V}: use backend='eager', which then runs"
        )
    if not isinstance(deterministic, bool):
        raise InvalidInput(f"deterministic must be True or False, got {deterministic!r}")
    for name in activated:
        if name not in ACTIVATED:
            raise InvalidInput(f"activated must be some of {', '.join(ACTIVATED)}; got {name!r}")
