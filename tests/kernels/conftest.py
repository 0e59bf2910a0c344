"""What the stage tests share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "of_a_wider_row": lambda x: torch.cat([x, x + 1], dim=1)[:, : x.shape[1]],
    "elements_apart": lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],
    "heads_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.fixture(params=VIEWS.values(), ids=VIEWS)
def view(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """Makes the same numbers lie otherwise."""
    return request.param
