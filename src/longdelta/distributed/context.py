"""The context of a packed batch on many ranks: who holds what, and how it crosses."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from longdelta.distributed import collectives
from longdelta.distributed.collectives import Group, Mesh
from longdelta.distributed.exchange import GatherBoundary, RelayBoundary
from longdelta.distributed.shards import moved, sharded, unsharded
from longdelta.errors import InvalidInput
from longdelta.kernels.stages import Tables
from longdelta.ops.boundary import Boundary, Segments
from longdelta.ops.handles import handle_of
from longdelta.plan.chains import summaries
from longdelta.plan.checks import checked_int, is_int
from longdelta.plan.conversion import conversion
from longdelta.plan.cost import rank_walk
from longdelta.plan.halo import Halo, halo
from longdelta.plan.partition import Partition, partition
from longdelta.plan.relay import gather, relay


class _Parts:
    """What the op needs of a context, by layer shape; the context's handle owns it, and it does not
    know the context."""

    def __init__(self, held: Partition, group: Group | None, rank: int, tag: int) -> None:
        self.partition, self.group, self.rank, self.tag = held, group, rank, tag
        self._built: dict[tuple[int, bool, torch.device], tuple[Tables, Boundary]] = {}

    def check_alive(self) -> None:
        place = collectives.place_in(self.group)
        if place != (self.rank, self.partition.ranks):
            raise InvalidInput(
                f"cp_context needs a process group of {self.partition.ranks} ranks in which this "
                f"is rank {self.rank}; here it is rank {place[0]} of {place[1]}; build it again"
            )

    def parts(self, HV: int, deterministic: bool, device: torch.device) -> tuple[Tables, Boundary]:
        self.check_alive()
        key = (HV, deterministic, device)
        if key not in self._built:
            self._built[key] = self._build(HV, deterministic, device)
        return self._built[key]

    def _build(self, HV: int, deterministic: bool, device: torch.device) -> tuple[Tables, Boundary]:
        walk = rank_walk(self.partition, self.rank, HV, deterministic)
        if self.group is None or self.partition.ranks == 1:
            return Tables(walk, device), Segments()
        if deterministic and not self.partition.keeps_contract(HV):
            _say_once(
                "a cut of this context does not lie on a segment border, so deterministic=True "
                "gives equal bits from run to run for this partition, not one device's bits; "
                f'align="segment" (num_v_heads={HV}) gives those'
            )
        plan = summaries(self.partition)
        held = (self.partition, self.rank, walk)
        if deterministic or plan.state_only:
            boundary: Boundary = RelayBoundary(
                self.group, self.tag, relay(*held), relay(*held, backward=True)
            )
        else:
            boundary = GatherBoundary(self.group, gather(*held), gather(*held, backward=True))
        return Tables(walk, device), boundary


class CPContext:
    """One packed batch over the ranks of a group; build it once per batch and share it by layers.

    Attributes:
        partition: which rank holds which tokens, equal on every rank.
        group, rank, ranks: the process group (None where there is one rank and no group).
        cu_seqlens: ``[fragments + 1]`` int64 on the CPU, boundaries of this rank's fragments.
        starts, ends: documents that start / end here: initial_state has one row for each of
            `starts`, final_state one for each of `ends`, in document order.
        rows: packed rows that this rank's tensors must have.
        handle: names this context inside the operators.
        device: where `shard` puts rows; None: where they are.
    Source: this project, docs/guides/context-parallelism.md.
    """

    def __init__(
        self,
        held: Partition,
        group: Group | None,
        device: torch.device | str | None,
        conv1d_kernel_size: int | None,
    ) -> None:
        self.partition = held
        self.group = group
        self.rank, self.ranks = collectives.place_in(group)
        self.device = None if device is None else torch.device(device)
        self.conv1d_kernel_size = conv1d_kernel_size
        with torch.inference_mode(False):
            bounds = held.local_cu_seqlens(self.rank)
            self.cu_seqlens = torch.tensor(bounds, dtype=torch.int64, device="cpu")
        self.starts = held.starts(self.rank)
        self.ends = held.ends(self.rank)
        self.rows = held.local_rows(self.rank)
        self.tag = int(held.digest()[:7], 16) * 4
        self._halo = lru_cache(maxsize=4)(lambda size: halo(held, size))
        self._bounds: dict[torch.device, Tensor] = {}
        self._parts = _Parts(held, group, self.rank, self.tag)
        self.handle = handle_of(self._parts, entries=1 + held.edges(self.rank))
        self.check_alive()

    def cu_seqlens_on(self, device: torch.device) -> Tensor:
        """`cu_seqlens` on a device; copied once."""
        if device not in self._bounds:
            with torch.inference_mode(False):
                self._bounds[device] = self.cu_seqlens.to(device)
        return self._bounds[device]

    def keeps_contract(self, num_v_heads: int | None = None) -> bool:
        """Whether every cut lies on a segment border for that many value heads (None: for any).

        Then `deterministic=True` gives the bits of one device; else the same bits from run to run.
        """
        return self.partition.keeps_contract(num_v_heads)

    def check_alive(self) -> None:
        """Raises unless the group still lives and is the one this context was built for."""
        self._parts.check_alive()

    def parts(self, HV: int, deterministic: bool, device: torch.device) -> tuple[Tables, Boundary]:
        """Tables of this rank and how states cross its borders, built once per layer shape."""
        return self._parts.parts(HV, deterministic, device)

    def halo(self, kernel_size: int) -> Halo:
        """Rows that a convolution of this kernel size exchanges."""
        if self.conv1d_kernel_size is not None and kernel_size > self.conv1d_kernel_size:
            raise InvalidInput(
                f"cp_context was built with conv1d_kernel_size={self.conv1d_kernel_size}; the "
                f"convolution has {kernel_size}. Build the context with the larger size"
            )
        return self._halo(kernel_size)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a whole tensor: [B, rows of the batch, ...] -> [B, rows, ...], on
        the context's device.

        Differentiable: the gradient of rows that other ranks hold is zero here.
        """
        self._check_rows("shard", x, dim, self.partition.rows)
        rows = sharded(x, dim, self.partition.rows_of(self.rank))
        return rows if self.device is None else rows.to(self.device)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor from every rank's rows, on every rank.

        Differentiable: the losses of all ranks add up, so a gradient is the sum over ranks.
        """
        self._check_rows("unshard", x, dim, self.rows)
        if self.group is None or self.ranks == 1:
            return sharded(x, dim, ((0, self.rows),))
        self.check_alive()
        return unsharded(x, dim, self.partition, self.group, self.tag + 2)

    def convert(self, x: Tensor, other: CPContext, dim: int = 1) -> Tensor:
        """This context's rows as the rows that `other` holds of the same batch. Differentiable."""
        self._check_rows("convert", x, dim, self.rows)
        if not isinstance(other, CPContext):
            raise InvalidInput(
                f"convert: other must come from build_cp_context, got {type(other).__name__}"
            )
        self.check_alive()
        other.check_alive()
        if collectives.members(self.group) != collectives.members(other.group):
            raise InvalidInput(
                f"convert: other must have this context's ranks {collectives.members(self.group)}, "
                f"got {collectives.members(other.group)}; build both on one group"
            )
        moves = conversion(self.partition, other.partition)
        if self.group is None or self.ranks == 1:
            return sharded(x, dim, ((0, self.rows),))
        back = conversion(other.partition, self.partition)
        return moved(x, dim, (moves, back), (other.rows, self.rows), self.group, self.tag + 2)

    def _check_rows(self, what: str, x: Tensor, dim: int, rows: int) -> None:
        if not isinstance(x, Tensor):
            raise InvalidInput(f"{what}: x must be a tensor, got {type(x).__name__}")
        if not (is_int(dim) and -x.dim() <= dim < x.dim()) or x.shape[dim] != rows:
            raise InvalidInput(
                f"{what}: x must have {rows} rows along dim {dim}; got {list(x.shape)}"
            )

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            f"cp_context belongs to rank {self.rank} of its group and cannot be copied or sent to "
            "another process; call build_cp_context on every rank"
        )

    def __str__(self) -> str:
        return f"rank {self.rank} of\n{self.partition}"


def build_cp_context(
    cu_seqlens: Tensor | Sequence[int],
    group: Group | Mesh | None = None,
    layout: str | Sequence[Sequence[Sequence[int]]] = "contiguous",
    *,
    align: str = "token",
    num_v_heads: int | None = None,
    fragments: Sequence[Sequence[Sequence[int]]] | None = None,
    rows: int | None = None,
    conv1d_kernel_size: int | None = None,
    device: torch.device | str | None = None,
) -> CPContext:
    """Agree once over the group on who holds which tokens of a packed batch.

    Every rank calls it with the same arguments; a difference raises on every rank. Afterwards the
    op, the convolution and the layer take the result as `cp_context=` and synchronise nothing more.

    Args:
        cu_seqlens: ``[N + 1]`` boundaries of the whole batch, in tokens: ints, or an int32 or int64
            tensor (copied to the host once).
        group: process group of the ranks; None: the default group, or one rank where
            torch.distributed is not initialised. Of a DeviceMesh: ``mesh.get_group("cp")`` or a
            mesh of one dimension.
        layout: "contiguous", "zigzag", "zigzag_per_document", "balanced"; or the fragments
            themselves, per rank its (document, offset, length) triples.
        align: "token" cuts anywhere; "segment" cuts on segment borders, so that
            `deterministic=True` gives the bits of one device.
        num_v_heads: HV of the layers, which fixes the segments; None: cuts that serve any HV.
        fragments: the same, where layout="fragments".
        rows: packed rows of the batch, where more than the documents have tokens; the last rank
            holds the rest.
        conv1d_kernel_size: the longest short convolution that will use the context; None: any.
        device: where `shard` puts rows; None: where the whole tensor is. The op takes tensors on
            any device that the group carries.
    Returns:
        A `CPContext`.
    Raises:
        InvalidInput: an argument is wrong, or differs between ranks (on every rank).
    Source: this project; layouts: docs/design/partition.md.
    """
    group = collectives.group_of(group)
    rank, ranks = collectives.place_in(group)
    given = not isinstance(layout, str) and fragments is None
    options = {
        "layout": "fragments" if given else layout,
        "align": align,
        "num_v_heads": num_v_heads,
        "fragments": layout if given else fragments,
        "rows": rows,
    }
    held = _planned(cu_seqlens, ranks, conv1d_kernel_size, device, options)
    plan = "none" if isinstance(held, InvalidInput) else held.digest()
    if group is not None and ranks > 1:
        said = f"{plan} conv={conv1d_kernel_size}"
        differ = collectives.agree(hashlib.sha256(said.encode()).digest(), group)
        if differ and not isinstance(held, InvalidInput):
            raise InvalidInput(
                f"build_cp_context must get the same arguments on every rank; ranks {differ} have "
                f"others than rank {rank}, whose plan is:\n{held}"
            )
    if isinstance(held, InvalidInput):
        raise held
    return CPContext(held, group, device, conv1d_kernel_size)


def _planned(
    cu_seqlens: Tensor | Sequence[int],
    ranks: int,
    conv1d_kernel_size: int | None,
    device: torch.device | str | None,
    options: dict[str, Any],
) -> Partition | InvalidInput:
    """The plan, or what is wrong with the arguments: every rank must reach the agreement."""
    try:
        _check_device(device)
        if conv1d_kernel_size is not None:
            checked_int("conv1d_kernel_size", conv1d_kernel_size, least=1)
        return partition(cu_seqlens, ranks, **options)
    except InvalidInput as error:
        return error
    except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        return InvalidInput(f"build_cp_context: {error}")


def _check_device(device: torch.device | str | None) -> None:
    try:
        torch.device("cpu" if device is None else device)
    except (TypeError, RuntimeError) as error:
        raise InvalidInput(
            f"device must be one of torch or None, got {device!r}: {error}"
        ) from None


@lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    warnings.warn(f"longdelta: {message}", stacklevel=3)
