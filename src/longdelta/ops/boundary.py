"""The seam where states cross borders: between segments on one device, and between ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longdelta.kernels.stages import Backend, Tables


class Boundary(Protocol):
    """Turns what the summaries left at the borders into states, in document order."""

    def enter(
        self, backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables, *, S_border: Tensor
    ) -> None:
        """S_ext at each border becomes the state that crosses it."""

    def leave(
        self, backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables, *, dS_border: Tensor
    ) -> None:
        """dS_ext at each border becomes the cotangent that crosses it backwards."""


class Context(Protocol):
    """What the op needs of a context-parallel context (`longdelta.distributed.CPContext`)."""

    def parts(self, HV: int, deterministic: bool, device: torch.device) -> tuple[Tables, Boundary]:
        """Tables of this rank, and how states cross its borders."""


class Segments:
    """Every border lies on this device: one fold each way."""

    def enter(
        self, backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables, *, S_border: Tensor
    ) -> None:
        backend.fold(M, M_bound, tables, tables.walk.chains, S=S_border)

    def leave(
        self, backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables, *, dS_border: Tensor
    ) -> None:
        backend.adjoint_fold(M, M_bound, tables, tables.walk.chains, dS=dS_border)
