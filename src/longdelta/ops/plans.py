"""From offsets to tables: the plan of a call is a pure function of the content of cu_seqlens.

Note [Offsets]: a device cu_seqlens is copied to the host once per content, known by the tensor's
identity, version and address, so that layers that share it, and the backward, read it from here; a
tensor changed in place is read again (a write through `.data` has no version and is not seen). A
CPU tensor costs nothing to read, may share memory with anything, and is read every time.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from longdelta.errors import InvalidInput
from longdelta.kernels.stages import Tables
from longdelta.plan.chunks import walk

READ_EVERY_TIME = frozenset({"cpu"})
"""Devices whose tensors are on the host already: Note [Offsets]."""

_read: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], tuple[int, ...]]] = {}


def host_offsets(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The boundaries as integers: Note [Offsets]."""
    if cu_seqlens.device.type in READ_EVERY_TIME or cu_seqlens.is_inference():
        return tuple(cu_seqlens.tolist())
    return remembered_offsets(cu_seqlens)


def remembered_offsets(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The boundaries of a device tensor, copied once per content."""
    key, mark = id(cu_seqlens), (cu_seqlens._version, cu_seqlens.data_ptr())
    known = _read.get(key)
    if known is not None and known[0]() is cu_seqlens and known[1] == mark:
        return known[2]
    offsets = tuple(cu_seqlens.tolist())
    reference = weakref.ref(cu_seqlens, lambda _: _read.pop(key, None))
    _read[key] = (reference, mark, offsets)
    return offsets


# A packing of 262,144 tokens holds some 5 MB on its device: enough for the packings in flight.
@lru_cache(maxsize=32)
def _tables(
    offsets: tuple[int, ...], rows: int, HV: int, deterministic: bool, device: torch.device
) -> Tables:
    check_offsets(offsets, rows)
    plan = walk(offsets, HV, rows=rows, deterministic=deterministic)
    return Tables(plan, device)


def check_offsets(offsets: tuple[int, ...], rows: int) -> None:
    """Raises unless the boundaries start at 0, never decrease, and end within the rows."""
    if offsets[0] != 0:
        raise InvalidInput(f"cu_seqlens must start at 0; cu_seqlens[0] is {offsets[0]}")
    for index, (left, right) in enumerate(pairwise(offsets)):
        if right < left:
            raise InvalidInput(
                f"cu_seqlens must not decrease; cu_seqlens[{index}] = {left} is followed by {right}"
            )
    if offsets[-1] > rows:
        raise InvalidInput(
            f"cu_seqlens must end within the T = {rows} rows; its last entry is {offsets[-1]}"
        )


def tables_of(
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    *,
    B: int,
    T: int,
    HV: int,
    deterministic: bool,
    device: torch.device,
) -> Tables:
    """Tables of a call: without boundaries each row of the batch is a document."""
    if cu_seqlens_cpu is not None:
        offsets = host_offsets(cu_seqlens_cpu)
    elif cu_seqlens is not None:
        offsets = host_offsets(cu_seqlens)
    else:
        offsets = tuple(row * T for row in range(B + 1))
    return _tables(offsets, B * T, HV, deterministic, device)
