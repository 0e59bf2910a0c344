"""Backends and devices on which the stage tests run."""

from collections.abc import Callable

import pytest
import torch

from longdelta.kernels.stages import Backend
from longdelta.ops.select import stages
from longdelta.testing.stages import StageCase
from longdelta.testing.workloads import MACHINES, NAMED

_GPU = {"cuda": [pytest.mark.gpu], "cpu": []}


@pytest.fixture(params=[pytest.param(m, marks=_GPU[m[1]], id="-".join(m)) for m in MACHINES])
def machine(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(backend, device)."""
    return request.param


@pytest.fixture
def backend(machine: tuple[str, str]) -> Backend:
    return stages(machine[0])


@pytest.fixture(params=["float64", "float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.fixture
def case_of(machine: tuple[str, str], dtype: torch.dtype) -> Callable[[str], StageCase]:
    """A named workload in this dtype on this machine."""
    return lambda name: StageCase(NAMED[name], dtype, machine[1])
