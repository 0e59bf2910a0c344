"""What the stage tests share."""

from collections.abc import Callable

import pytest
import torch

from longdelta.kernels.stages import Backend
from longdelta.ops.select import stages
from longdelta.testing.stages import StageCase
from longdelta.testing.workloads import NAMED, Machine


@pytest.fixture
def backend(machine: Machine) -> Backend:
    return stages(machine.backend)


@pytest.fixture(params=[torch.float64, torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def case_of(machine: Machine, dtype: torch.dtype) -> Callable[[str], StageCase]:
    """A named workload in this dtype on this machine."""
    return lambda name: StageCase(NAMED[name], dtype, machine)
