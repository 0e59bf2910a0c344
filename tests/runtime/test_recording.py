"""A recorded body launches what the body would launch, on the buffers of the call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from longdelta.runtime import launch
from longdelta.runtime.launch import Launch, Program, Scope
from longdelta.runtime.recording import Recordings

GPU = torch.device("cuda", 0)
Body = Callable[[Tensor, Tensor, Tensor], None]


class Bodies:
    """A body of two launches over a workspace, and how often its Python was run."""

    def __init__(self, kernel: Any, monkeypatch: pytest.MonkeyPatch, ran: list[Any]) -> None:
        self.one = Program(kernel, 3, GPU, 99, 5, FLAG=True)
        self.two = Program(kernel, 4, GPU, 98, 5, FLAG=True)
        self.recordings = Recordings()
        self.count = 0
        self.spaces: list[int] = []
        self.ran = ran
        empty = torch.empty

        def here(*size: Any, device: Any = None, **options: Any) -> Tensor:
            """On this machine, whatever the device; its address is kept."""
            if device == "meta":
                return empty(*size, device=device, **options)
            made = empty(*size, **options)
            self.spaces.append(made.data_ptr())
            return made

        monkeypatch.setattr(torch, "empty", here)

    def run(
        self,
        x: Tensor,
        y: Tensor,
        extra: Callable[[Tensor], object] | None = None,
        spaces: int = 1,
    ) -> None:
        """Reads x and y, writes a result; so many buffers are allocated besides the results."""

        def body(result: Tensor, unused: Tensor) -> None:
            self.count += 1
            space = torch.empty(1024, dtype=torch.uint8, device=GPU)
            middle = space.view(torch.float32).as_strided((4, 8), (8, 1), 64)
            self.one(x, middle)
            if extra is not None:
                extra(y)
            self.two(middle[1:], y)
            self.two(result, space[:0])

        self.ran.clear()
        self.spaces.clear()
        with Scope("forward", GPU) as scope:
            result, unused = self.recordings.run(
                scope, ("option",), (x, y, None), lambda: (x.new_empty(7), y.new_empty(0)), body
            )
        assert (result.shape, result.dtype) == ((7,), x.dtype)
        assert (unused.shape, unused.dtype) == ((0,), y.dtype)
        space, *others = [x for x in self.spaces if x not in (result.data_ptr(), 0)]
        assert len(others) == spaces - 1
        assert [each.arguments[:2] for each in self.ran] == [
            (x.data_ptr(), space + 256),
            (space + 288, y.data_ptr()),
            (result.data_ptr(), 0),
        ]
        assert [(each.grid, each.arguments[2]) for each in self.ran] == [(3, 99), (4, 98), (4, 98)]


@pytest.fixture
def bodies(kernel, monkeypatch, ran) -> Bodies:
    return Bodies(kernel, monkeypatch, ran)


def pair() -> tuple[Tensor, Tensor]:
    return torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)


def test_third_call_of_a_kind_launches_on_its_own_buffers_without_the_body(bodies):
    held = [pair() for _ in range(5)]  # all alive, so that every address is another
    for x, y in held:
        bodies.run(x, y)
    assert bodies.count == 2


def test_recorded_body_has_the_records_of_the_body(bodies, kernel):
    name = kernel.__name__
    wanted = (Launch("forward", name, 3, 1), Launch("forward", name, 4, 2))
    for _ in range(4):
        bodies.run(*pair())
        assert launch.records() == wanted


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.zeros(65), torch.zeros(64, dtype=torch.bfloat16)),
        lambda: (torch.zeros(64), torch.zeros(64, dtype=torch.float16)),
        lambda: (torch.zeros(128)[::2], torch.zeros(64, dtype=torch.bfloat16)),
        lambda: (torch.zeros(65)[1:], torch.zeros(64, dtype=torch.bfloat16)),
    ],
    ids=["shape", "dtype", "strides", "alignment"],
)
def test_tensors_that_look_otherwise_have_a_recording_of_their_own(bodies, other):
    for _ in range(3):
        bodies.run(*pair())
    for count in (3, 4, 4):
        bodies.run(*other())
        assert bodies.count == count
    bodies.run(*pair())
    assert bodies.count == 4


COMPUTES = {
    "+": lambda y: y + 1,
    "zero_": lambda y: y.zero_(),
    "clone": lambda y: y.clone(),
    "float": lambda y: y.float(),
    "contiguous": lambda y: y[::2].contiguous(),
    "reshape": lambda y: y.view(8, 8).t().reshape(64),
    "item": lambda y: y[0].item(),
}


@pytest.mark.parametrize("below", [False, True], ids=["with autograd", "below autograd"])
@pytest.mark.parametrize("extra", COMPUTES.values(), ids=COMPUTES)
def test_body_in_which_torch_computes_is_run_every_time(bodies, extra, below):
    """Below autograd, where a call is, composite operations are seen as a whole."""
    for count in range(1, 6):
        with torch._C._AutoDispatchBelowAutograd() if below else nullcontext():
            bodies.run(*pair(), extra=extra)
        assert bodies.count == count


@pytest.mark.parametrize("below", [False, True], ids=["with autograd", "below autograd"])
def test_operations_that_copy_nothing_are_no_computation(bodies, below):
    def extra(y: Tensor) -> None:
        y.contiguous().reshape(8, 8).to(y.dtype).flatten()
        torch.empty(3, device="meta")

    for _ in range(4):
        with torch._C._AutoDispatchBelowAutograd() if below else nullcontext():
            bodies.run(*pair(), extra=extra)
    assert bodies.count == 2


def test_what_a_body_allocates_without_launching_on_it_is_not_allocated_again(bodies):
    for _ in range(2):
        bodies.run(*pair(), extra=lambda y: torch.empty(100), spaces=2)
    bodies.run(*pair())


def test_body_that_computed_at_first_is_watched_again(bodies):
    x, y = pair()
    for extra in (None, torch.clone, torch.clone, None, None):
        bodies.run(x, y, extra=extra)
    assert bodies.count == 4


def test_first_call_that_fails_is_followed_by_a_first_call(bodies):
    def fail(y: Tensor) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        bodies.run(*pair(), extra=fail)
    bodies.run(*pair(), extra=torch.clone)
    for _ in range(3):
        bodies.run(*pair())
    assert bodies.count == 3


def test_watching_leaves_no_mark_on_the_process(bodies):
    """Two threads watch at once; a flag of the process would keep what the first one found."""
    marks = []

    def look(y: Tensor) -> None:
        marks.append(is_in_torch_dispatch_mode())

    for _ in range(2):
        bodies.run(*pair(), extra=look)
    assert marks == [False, False]


def test_watching_imports_nothing():
    code = (
        "import sys, torch; from longdelta.runtime.recording import _Watch\n"
        "with _Watch() as watch: torch.empty(3).view(3)\n"
        "assert len(watch.spaces) == 1 and watch.only_launches\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_views_are_no_computation(bodies):
    for _ in range(4):
        bodies.run(*pair(), extra=lambda y: y.view(8, 8).transpose(0, 1)[2:].detach())
    assert bodies.count == 2


def test_one_tensor_in_two_places_is_not_taken_for_a_rule(bodies):
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        bodies.run(x, x)
    assert bodies.count == 3
    for _ in range(3):
        bodies.run(x, y)


def test_fresh_runs_the_body(bodies):
    for _ in range(3):
        bodies.run(*pair())
    with launch.fresh():
        bodies.run(*pair())
    assert bodies.count == 3


def test_recorded_launches_go_to_the_stream_that_is_current(bodies, driver):
    for driver.stream in (7, 7, 7, 9):
        bodies.run(*pair())
        assert {each.stream for each in bodies.ran} == {driver.stream}


def test_captured_recording_keeps_its_programs(bodies, driver):
    for _ in range(3):
        bodies.run(*pair())
    assert bodies.one not in launch._captured
    driver.capturing = True
    bodies.run(*pair())
    assert {bodies.one, bodies.two} <= launch._captured
    assert bodies.count == 2


def test_body_that_fails_while_it_is_watched_is_watched_again(bodies):
    def fail(y: Tensor) -> None:
        raise KeyError

    bodies.run(*pair())
    with pytest.raises(KeyError):
        bodies.run(*pair(), extra=fail)
    for _ in range(3):
        bodies.run(*pair())
    assert bodies.count == 3


def test_launch_on_another_device_is_not_recorded(bodies, kernel, ran):
    elsewhere = Program(kernel, 1, torch.device("cuda", 1), 99, 5, FLAG=True)
    count = 0

    def body() -> None:
        nonlocal count
        count += 1
        elsewhere(*pair)

    pair = torch.zeros(64), torch.zeros(64)
    for _ in range(4):
        with Scope("forward", GPU) as scope:
            bodies.recordings.run(scope, (), pair, tuple, body)
    assert count == 4
    assert {each.device for each in ran} == {1}


def test_only_so_many_recordings_are_kept(bodies):
    for n in range(1, 200):
        bodies.run(torch.zeros(n), torch.zeros(3))
    assert len(bodies.recordings._known) <= 64
