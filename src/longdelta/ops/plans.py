"""From offsets to tables: the plan of a call is a pure function of the content of cu_seqlens.

Note [Offsets]: a device cu_seqlens is copied to the host once per content, known by the tensor's
identity and version, so that layers that share it, and the backward, read it from here; a tensor
changed in place is read again.
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

_read: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = {}


def host_offsets(cu_seqlens: Tensor) -> tuple[int, ...]:
    """The boundaries as integers: Note [Offsets]."""
    if cu_seqlens.is_inference():
        return tuple(cu_seqlens.tolist())
    key = id(cu_seqlens)
    known = _read.get(key)
    if known is not None and known[0]() is cu_seqlens and known[1] == cu_seqlens._version:
        return known[2]
    offsets = tuple(cu_seqlens.tolist())
    reference = weakref.ref(cu_seqlens, lambda _: _read.pop(key, None))
    _read[key] = (reference, cu_seqlens._version, offsets)
    return offsets


@lru_cache(maxsize=256)
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
