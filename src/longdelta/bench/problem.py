"""The tensors of a row, and where this process stands among the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longdelta.bench.rows import Row
from longdelta.distributed.collectives import Group

NAMES = ("q", "k", "v", "g", "beta")
"""Order of `Problem.inputs` and of what every arm is called with."""


@dataclass(frozen=True)
class Place:
    """Where this process runs: its device, its group (None: alone), its rank and the ranks."""

    device: torch.device
    group: Group | None = None
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Problem:
    """A row's whole tensors, equal on every rank.

    Attributes:
        inputs: q, k ``[1, T, H, K]``, v ``[1, T, HV, V]`` bfloat16 (float32 on a CPU); g, beta
            ``[1, T, HV]`` float32.
        do: cotangent of o, like v.
    """

    row: Row
    place: Place
    inputs: tuple[Tensor, ...]
    do: Tensor

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """``[N + 1]`` int32 on the device."""
        return torch.tensor(self.row.offsets, dtype=torch.int32, device=self.place.device)

    @cached_property
    def cu_seqlens_cpu(self) -> Tensor:
        """``[N + 1]`` int32 on the host."""
        return torch.tensor(self.row.offsets, dtype=torch.int32)


def problem_of(row: Row, place: Place) -> Problem:
    """Draws a row's tensors on the device, from its seed."""
    device, T = place.device, row.tokens
    random = torch.Generator(device).manual_seed(row.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=device)

    def unit() -> Tensor:
        return torch.nn.functional.normalize(normal(1, T, row.H, row.K), dim=-1).to(dtype)

    q, k = unit(), unit()
    v, do = (normal(1, T, row.HV, row.V).to(dtype) for _ in range(2))
    g = _gates(row, normal(1, T, row.HV), torch.rand(row.HV, generator=random, device=device))
    beta = normal(1, T, row.HV).sigmoid()
    return Problem(row, place, (q, k, v, g, beta), do)


def _gates(row: Row, x: Tensor, uniform: Tensor) -> Tensor:
    if row.gates == "mild":
        return torch.nn.functional.logsigmoid(x) / 16
    if row.gates == "model":
        return -16 * uniform * torch.nn.functional.softplus(x + 1)
    return torch.full_like(x, -6.0)
