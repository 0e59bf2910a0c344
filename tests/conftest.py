"""What every test shares: one thread, a fixed seed, torch's global switches put back afterwards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from longdelta.testing.workloads import MACHINES, Machine

# Several test processes share the cores: a second thread on a busy core is far slower than none.
torch.set_num_threads(1)

# The same examples on every run and no deadline: a slow machine is not a failure.
settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def torch_globals() -> Iterator[None]:
    """Seeds torch; a test may then set threads, dtype or determinism as it likes."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(strict, warn_only=warn_only)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Test processes take one test at a time, and one of them all those on many ranks: their pool
    of processes starts once. (xdist's own groups have no effect under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class OnePool(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = "tests/distributed"
            return folder if nodeid.startswith(f"{folder}/") else nodeid

    return OnePool(config, log)


@pytest.fixture(params=MACHINES, ids=str)
def machine(request: pytest.FixtureRequest) -> Machine:
    """Where a test runs; `parametrize("machine", ..., indirect=True)` names some of them alone."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out dtypes that a machine does not take; skips tests on a GPU where there is none."""
    skip = pytest.mark.skip(reason="no CUDA device here")
    kept = []
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        machine, dtype = given.get("machine"), given.get("dtype")
        if not isinstance(machine, Machine):
            kept.append(item)
        elif dtype is None or machine.dtype(dtype) == dtype:
            kept.append(item)
            if machine.device == "cuda":
                item.add_marker("gpu")
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(skip)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what the compiler made of each kernel: tests/kernels/test_compile.py."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    lines = [value for r in reports for name, value in r.user_properties if name == "kernel"]
    if lines:
        terminalreporter.section("kernels compiled for sm_90a")
    for line in lines:
        terminalreporter.write_line(line)
