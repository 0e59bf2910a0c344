"""Stage tensors as views of flat buffers: the saved set and the workspace of one direction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longdelta.plan import tensors
from longdelta.plan.tensors import Counts


@dataclass(frozen=True)
class Sizes:
    """What the stage tensors of one call measure."""

    counts: Counts
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    """Of the inputs."""
    backend: str
    T: int = 0
    H: int = 0

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.dtype)

    def views(self, names: tuple[str, ...], buffer: Tensor) -> dict[str, Tensor]:
        """The named tensors, one after another in the buffer of bytes."""
        parts, total = _parts(self, names)
        assert buffer.numel() >= total, f"buffer of {buffer.numel()} bytes, {total} needed"
        typed: dict[torch.dtype, tuple[Tensor, Any]] = {}
        found = {}
        for name, dtype, shape, strides, offset in parts:
            if dtype not in typed:
                whole = buffer.view(dtype)
                typed[dtype] = whole, whole.storage_offset()
            whole, start = typed[dtype]
            found[name] = whole.as_strided(shape, strides, start + offset)
        return found

    def _dtype_of(self, name: str) -> torch.dtype:
        size = tensors.itemsize(name, dtype_name(self.dtype), self.backend)
        if size == 2:
            return torch.float16 if name == "Z" else torch.bfloat16
        return self.compute_dtype

    def new(self, names: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
        """The named tensors in one fresh buffer."""
        buffer = torch.empty(_parts(self, names)[1], dtype=torch.uint8, device=device)
        return self.views(names, buffer)

    def _layout(self, names: tuple[str, ...]) -> tuple[tuple[tensors.Place, ...], int]:
        return tensors.layout(
            names,
            self.counts,
            HV=self.HV,
            K=self.K,
            V=self.V,
            T=self.T,
            H=self.H,
            dtype=dtype_name(self.dtype),
            backend=self.backend,
        )


Part = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Name, dtype, shape, strides and offset, in elements."""


@lru_cache(maxsize=256)
def _parts(sizes: Sizes, names: tuple[str, ...]) -> tuple[tuple[Part, ...], int]:
    """How to view a buffer, and its bytes: worked out once, not in every call."""
    places, total = sizes._layout(names)
    parts = []
    for place in places:
        dtype = sizes._dtype_of(place.name)
        strides = torch.empty(place.shape, device="meta").stride()
        parts.append((place.name, dtype, place.shape, strides, place.offset // dtype.itemsize))
    return tuple(parts), total


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As the plan spells it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
