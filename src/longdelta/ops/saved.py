"""Stage tensors as views of flat buffers: the saved set and the workspace of one direction."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.dtype)

    def views(self, names: tuple[str, ...], buffer: Tensor) -> dict[str, Tensor]:
        """The named tensors, one after another in the buffer of bytes."""
        places, total = self._layout(names)
        assert buffer.numel() >= total, f"buffer of {buffer.numel()} bytes, {total} needed"
        found = {}
        for place in places:
            part = buffer[place.offset : place.offset + place.size_bytes]
            found[place.name] = part.view(self._dtype_of(place.name)).view(place.shape)
        return found

    def _dtype_of(self, name: str) -> torch.dtype:
        size = tensors.itemsize(name, dtype_name(self.dtype), self.backend)
        if size == 2:
            return torch.float16 if name == "Z" else torch.bfloat16
        return self.compute_dtype

    def new(self, names: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
        """The named tensors in one fresh buffer."""
        buffer = torch.empty(self._layout(names)[1], dtype=torch.uint8, device=device)
        return self.views(names, buffer)

    def _layout(self, names: tuple[str, ...]) -> tuple[tuple[tensors.Place, ...], int]:
        return tensors.layout(
            names,
            self.counts,
            HV=self.HV,
            K=self.K,
            V=self.V,
            dtype=dtype_name(self.dtype),
            backend=self.backend,
        )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As the plan spells it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
