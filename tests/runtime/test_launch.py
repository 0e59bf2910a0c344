"""What is launched, where, and what of it is looked up."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from longdelta import gdn_forward
from longdelta.runtime import launch
from longdelta.runtime.launch import Launch, Plan, Program, Scope, resolved

GPU = [torch.device("cuda", index) for index in range(2)]


def tensors(shift: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two tensors, the second `shift` elements past an aligned address."""
    return torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=dtype)[shift:]


@pytest.fixture
def program(kernel) -> Program:
    return Program(kernel, 3, GPU[0], 99, 5, FLAG=True)


def test_scope_makes_its_device_current_and_gives_it_back_after_an_exception(driver):
    def body() -> None:
        with Scope("forward", GPU[1]):
            assert driver.device == 1
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert driver.device == 0
    assert launch._thread.scope is None


def test_scopes_nest_and_the_outer_one_goes_on(driver, ran, kernel):
    x = tensors()
    with Scope("backward", GPU[0]):
        Program(kernel, 1, GPU[0], 99, 5, FLAG=True)(*x)
        with Scope("forward", GPU[1]):
            Program(kernel, 2, GPU[1], 99, 5, FLAG=True)(*x)
        Program(kernel, 3, GPU[0], 99, 5, FLAG=True)(*x)
    assert [(each.device, each.grid) for each in ran] == [(0, 1), (1, 2), (0, 3)]
    name = kernel.__name__
    assert launch.records() == (
        Launch("forward", name, 2, 1),
        Launch("backward", name, 1, 1),
        Launch("backward", name, 3, 1),
    )


def test_scopes_of_two_threads_do_not_see_each_other(driver, ran, kernel):
    x, both = tensors(), threading.Barrier(2)

    def body(index: int) -> None:
        driver.stream = index
        with Scope(None, GPU[index]):
            both.wait()
            Program(kernel, 10 + index, GPU[index], 99, 5, FLAG=True)(*x)
            both.wait()

    threads = [threading.Thread(target=body, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sorted((each.device, each.stream, each.grid) for each in ran)
    assert seen == [(0, 0, 10), (1, 1, 11)]
    assert (driver.device, driver.stream) == (0, 7)


@pytest.mark.parametrize("inside", [False, True], ids=["no scope", "the scope of another device"])
def test_launch_binds_a_device_that_no_scope_has_bound(driver, ran, kernel, inside):
    program = Program(kernel, 1, GPU[1], 99, 5, FLAG=True)
    if inside:
        with Scope("forward", GPU[0]):
            program(*tensors())
    else:
        program(*tensors())
    assert [each.device for each in ran] == [1]
    assert driver.device == 0


def test_device_without_an_index_is_the_one_current_when_the_program_is_made(
    driver, ran, kernel, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    Program(kernel, 1, torch.device("cuda"), 99, 5, FLAG=True)(*tensors())
    assert [each.device for each in ran] == [1]


def test_tables_are_made_known_to_each_stream_that_reads_them_once(
    driver, ran, monkeypatch, kernel
):
    """torch may hand memory of a forgotten plan out again when its own stream is done with it."""
    known: list[tuple[int, Tensor]] = []
    monkeypatch.setattr(launch, "_read_here", lambda table: known.append((driver.stream, table)))
    table = torch.zeros(4, dtype=torch.int32)
    program = Program(kernel, 3, GPU[0], table, 5, FLAG=True)
    with Scope("forward", GPU[0]):
        for driver.stream in (7, 7, 8, 7):
            program(*tensors())
    assert [stream for stream, each in known] == [7, 8]
    assert all(each is table for _, each in known)


def test_launch_after_a_switch_of_the_stream_goes_to_the_new_one(driver, ran, program):
    x = tensors()
    with Scope("forward", GPU[0]):
        for driver.stream in (7, 7, 8, 7):
            program(*x)
    assert [each.stream for each in ran] == [7, 7, 8, 7]


def test_known_launch_passes_what_the_first_one_passed(ran, program):
    x, y = tensors(), tensors()
    for moving in (x, y, x):
        program(*moving)
    assert [each.grid for each in ran] == [3, 3, 3]
    assert ran[0] == ran[2]
    assert ran[1].arguments == (y[0].data_ptr(), y[1].data_ptr(), 99, 5, True)


def test_nothing_is_launched_without_programs(ran, kernel):
    Program(kernel, 0, GPU[0], 99, 5, FLAG=True)(*tensors())
    assert ran == []
    assert launch.records() == ()


def test_another_plan_compiles_nothing_anew(kernel):
    for grid, rows in ((3, 99), (4, 16), (400, 1)):
        Program(kernel, grid, GPU[0], rows, 5, FLAG=True)(*tensors())
    assert len(kernel.compiled) == 1


@pytest.mark.parametrize(
    "changed",
    [
        lambda kernel: Program(kernel, 3, GPU[0], 99, 5, FLAG=True)(*tensors(shift=1)),
        lambda kernel: Program(kernel, 3, GPU[0], 99, 5, FLAG=True)(*tensors(dtype=torch.float16)),
        lambda kernel: Program(kernel, 3, GPU[0], 99, 16, FLAG=True)(*tensors()),
        lambda kernel: Program(kernel, 3, GPU[0], 2**31 + 1, 5, FLAG=True)(*tensors()),
        lambda kernel: Program(kernel, 3, GPU[0], 99, 5, FLAG=False)(*tensors()),
        lambda kernel: Program(kernel, 3, GPU[0], 99, 5, FLAG=True, num_warps=8)(*tensors()),
        lambda kernel: Program(kernel, 3, GPU[1], 99, 5, FLAG=True)(*tensors()),
    ],
    ids=["alignment", "dtype", "divisor", "wide integer", "constant", "warps", "device"],
)
def test_what_the_machine_code_depends_on_is_compiled_for(kernel, program, changed):
    program(*tensors())
    changed(kernel)
    assert len(kernel.compiled) == 2
    changed(kernel)
    assert len(kernel.compiled) == 2


def test_program_is_made_once_for_a_plan_and_its_scalars(kernel):
    made = []

    def make(plan: Plan, grid: int) -> Program:
        made.append((plan, grid))
        return Program(kernel, grid, GPU[0], 99, 5, FLAG=True)

    plans = Plan(), Plan()
    for plan, grid in ((plans[0], 1), (plans[0], 2), (plans[1], 1), (plans[0], 1), (plans[1], 1)):
        resolved(plan, make, grid)
    assert made == [(plans[0], 1), (plans[0], 2), (plans[1], 1)]
    for grid in range(1000):
        resolved(plans[0], make, grid)
    assert len(plans[0].programs) <= 64


def test_fresh_resolves_every_launch_and_passes_the_same(kernel, ran):
    made, plan, x = [], Plan(), tensors()

    def make(plan: Plan) -> Program:
        made.append(plan)
        return Program(kernel, 3, GPU[0], 99, 5, FLAG=True)

    def call() -> None:
        resolved(plan, make)(*x)

    def call_afresh() -> None:
        with launch.fresh():
            call()
            other = threading.Thread(target=call)  # as autograd does for a backward
            other.start()
            other.join()
            raise KeyError

    call()
    call()
    with pytest.raises(KeyError):
        call_afresh()
    call()
    assert len(made) == len(kernel.compiled) == 3
    assert len(set(ran)) == 1


def test_fresh_blocks_of_two_threads_overlap():
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with launch.fresh():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with launch.fresh():
        thread.start()
        inside.wait(10)
    assert launch._fresh
    leave.set()
    thread.join()
    assert not launch._fresh


def test_records_are_those_of_the_last_forward_and_the_last_backward(kernel):
    x = tensors()
    first, second = (Program(kernel, grid, GPU[0], 99, 5, FLAG=True) for grid in (1, 2))
    for phase, programs in (
        ("backward", [first]),
        ("forward", [second]),
        ("forward", [first, second, second, first]),
    ):
        with Scope(phase, GPU[0]):
            for each in programs:
                each(*x)
    first(*x)
    found = [(each.phase, each.grid, each.count) for each in launch.records()]
    assert found == [("forward", 1, 1), ("forward", 2, 2), ("forward", 1, 1), ("backward", 1, 1)]
    launch.forget_records()
    assert launch.records() == ()


def test_records_are_empty_after_a_call_of_the_eager_backend(program):
    with Scope("forward", GPU[0]):
        program(*tensors())
    assert launch.records()
    q, v, g = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1)
    gdn_forward(q, q, v, g, g, backend="eager")
    assert launch.records() == ()


def test_what_a_captured_graph_reads_outlives_its_plan(driver, kernel):
    table = torch.zeros(4)
    alive = weakref.ref(table)
    program = Program(kernel, 1, GPU[0], table, 5, FLAG=True)
    plan = Plan()
    program(*tensors())
    driver.capturing = True
    with Scope("forward", GPU[0], plan):
        program(*tensors())
    assert plan in launch._captured
    kernel.compiled.clear()
    del program, table
    gc.collect()
    assert alive() is not None
    launch._captured.clear()
    gc.collect()
    assert alive() is None


def test_kernel_that_takes_tiles_as_they_are_gets_no_words_of_another(driver, ran, kernel):
    """A tile is kept for its place, and encoded by the first kernel that takes it so."""
    tiles = pytest.importorskip("longdelta.kernels.gluon.tiles", reason="no Triton here")
    tile = tiles.flat(torch.zeros(64, 64, dtype=torch.bfloat16), 64, 64)
    tile.words = ["words"]
    program = Program(kernel, 3, GPU[0], 99, 5, FLAG=True)
    for _ in range(2):
        program(tile, tensors()[0])
    assert [each.arguments[0] for each in ran][1] is tile
