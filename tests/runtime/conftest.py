"""A driver that writes down what it is asked, for devices that need not exist."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longdelta.runtime import launch


@dataclass(frozen=True)
class Ran:
    """One launch as the driver saw it."""

    device: int
    stream: int
    grid: int
    arguments: tuple[Any, ...]


@dataclass
class Driver(threading.local):
    """The current device and stream of each thread."""

    device: int = 0
    stream: int = 7
    capturing: bool = False

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before


class Kernel:
    """Stands in for a compiled function of two tensors, two integers and a constant."""

    arg_names = ("x", "y", "rows", "n", "FLAG")
    do_not_specialize = ("rows",)

    def __init__(self, driver: Driver, ran: list[Ran], name: str = "copy_kernel") -> None:
        self.__name__ = name
        self.driver, self.ran = driver, ran
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_and_run(
            *arguments: Any, num_warps: int, launch_pdl: bool, **constants: Any
        ) -> Any:
            self.compiled.append(arguments)
            passed = [*arguments, *constants.values()]
            self.run(*grid, 1, 1, self.driver.stream, 0, 0, None, None, None, *passed)
            return SimpleNamespace(run=self.run, function=0, packed_metadata=0, metadata=None)

        return compile_and_run

    def run(self, grid: int, y: int, z: int, stream: int, *rest: Any) -> None:
        seen = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in rest[5:])
        self.ran.append(Ran(self.driver.device, stream, grid, seen))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(launch, "_on", found.on)
    monkeypatch.setattr(launch, "_stream", lambda device: found.stream)
    monkeypatch.setattr(launch, "_capturing", lambda: found.capturing)
    monkeypatch.setattr(launch, "_captured", set())
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch.toolchain, "compiling", nullcontext)
    launch.forget_records()
    return found


@pytest.fixture
def ran() -> list[Ran]:
    """Launches of every thread, in order."""
    return []


@pytest.fixture
def kernel(driver: Driver, ran: list[Ran]) -> Kernel:
    return Kernel(driver, ran)
