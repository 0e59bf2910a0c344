"""Backends and devices on which the tests of the op run."""

from collections.abc import Callable

import pytest

from longdelta.testing.workloads import MACHINES, Results, Workload, evaluate

_GPU = {"cuda": [pytest.mark.gpu], "cpu": []}


@pytest.fixture(params=[pytest.param(m, marks=_GPU[m[1]], id="-".join(m)) for m in MACHINES])
def machine(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(backend, device)."""
    return request.param


@pytest.fixture
def run(machine: tuple[str, str]) -> Callable[..., Results]:
    """The op, forward and backward, on a workload in a dtype."""

    def on_machine(work: Workload, dtype, **options) -> Results:
        backend, device = machine
        inputs, cotangents = work.inputs(dtype, device), work.cotangents(dtype, device)
        return evaluate(inputs, cotangents, backend=backend, **options)

    return on_machine
