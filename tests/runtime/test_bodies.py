"""Forwards and backwards of the Hopper backend on the host: what they launch and allocate."""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="no Triton here")

from triton.runtime.jit import KernelInterface

from longdelta import gdn_forward
from longdelta.arguments import inputs_of
from longdelta.kernels.gluon import tiles
from longdelta.kernels.gluon.adjoint_scan import adjoint_scan
from longdelta.kernels.gluon.adjoint_summarize import adjoint_summarize
from longdelta.kernels.gluon.gradients import gradients
from longdelta.kernels.gluon.tables import DeviceTables
from longdelta.kernels.gluon.tiles import in_place
from longdelta.kernels.stages import Tables
from longdelta.ops import library, plans, saved, select
from longdelta.plan.chunks import Walk, walk
from longdelta.plan.tensors import Counts, shape
from longdelta.runtime import launch, recording

CPU = torch.device("cpu")


class Kernels:
    """Every kernel, compiled by nobody: what was asked to be compiled, and what was launched."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launched: list[tuple[str, int, list[Any]]] = []
        self.passed: list[tuple[Any, ...]] = []
        """Arguments of each launch as they came."""
        self.spaces: list[Tensor] = []
        self.copies: list[weakref.ref[Tensor]] = []
        """Made since the last launch: a launch may read them, so they must still be there."""

    def of(self, kernel: Any, grid: tuple[int]) -> Any:
        name = kernel.__name__

        def run(grid: int, y: int, z: int, *rest: Any) -> None:
            assert all(copy() is not None for copy in self.copies), name
            self.copies.clear()
            self.launched.append((name, grid, list(map(self.plain, rest[6:]))))
            self.passed.append(rest[6:])

        def compile_and_run(*arguments: Any, num_warps: int, **options: Any) -> Any:
            self.compiled.append(name)
            rest = kernel.arg_names[len(arguments) :]
            run(*grid, 1, 1, *[None] * 6, *arguments, *(options[each] for each in rest))
            metadata = SimpleNamespace(tensordesc_meta=[None] * 9)
            return SimpleNamespace(run=run, function=0, packed_metadata=0, metadata=metadata)

        return compile_and_run

    @staticmethod
    def plain(x: Any) -> Any:
        """Of a tensor or a descriptor: what it looks like, without its address."""
        if hasattr(x, "block_shape"):
            return x.base.dtype, x.shape, x.strides, x.block_shape
        # What a plan settled comes as its address.
        return "tensor" if isinstance(x, Tensor) or (type(x) is int and x > 2**32) else x

    def places(self, named: dict[str, Tensor]) -> list[list[Any]]:
        """Arguments of all launches, with (buffer, bytes into it) for what lies in a named one."""

        def place(x: Any) -> Any:
            tile = getattr(x, "base", x) if hasattr(x, "block_shape") else None
            if tile is not None:
                return (*self.plain(x), place(tile.address + tile.ahead))
            address = x.data_ptr() if isinstance(x, Tensor) else x
            for name, y in named.items():
                if type(address) is int and 0 <= address - y.data_ptr() < y.nbytes:
                    return name, address - y.data_ptr()
            return address

        return [list(map(place, arguments)) for arguments in self.passed]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """The Hopper backend on this machine, its kernels stood in for."""
    found = Kernels()
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: found.of(kernel, grid))
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_stream", lambda device: 0)

    class Torch:
        """torch with an eye on what is allocated."""

        def __init__(self, note: Callable[[Tensor], None]) -> None:
            self.note = note

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *what: Any, **options: Any) -> Tensor:
            made = torch.empty(*what, **options)
            self.note(made)
            return made

    monkeypatch.setattr(tiles, "torch", Torch(lambda made: found.copies.append(weakref.ref(made))))
    for module in (saved, recording):
        monkeypatch.setattr(module, "torch", Torch(found.spaces.append))
    monkeypatch.setattr(launch, "encode", lambda tile, how: [tile])
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(launch.toolchain, "compiling", nullcontext)
    monkeypatch.setattr(select, "_gluon_reason", lambda *problem: None)
    monkeypatch.setattr(select, "_selected", {})
    monkeypatch.setattr(library, "require_backward", lambda device: None)
    plans._tables.cache_clear()
    yield found
    plans._tables.cache_clear()


def problem(lengths: list[int], H: int = 1, HV: int = 2, raw: bool = True) -> dict[str, Any]:
    T = sum(lengths)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    x = {name: torch.zeros(1, T, H, 128, dtype=torch.bfloat16) for name in "qk"}
    x |= {"v": torch.zeros(1, T, HV, 128, dtype=torch.bfloat16), "cu_seqlens_cpu": offsets}
    x |= {"g": torch.zeros(1, T, HV), "beta": torch.zeros(1, T, HV)}
    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    return x | (dict.fromkeys(flags, True) | {"A_log": torch.zeros(HV)} if raw else {})


def forward(x: dict[str, Any], **options: Any) -> Any:
    return gdn_forward(**x, backend="gluon", **options)


def backward(x: dict[str, Any], save: str = "light", **options: Any) -> Any:
    """Of a saved set that is all zeros: what it holds is not read."""
    inputs = inputs_of(**x, output_final_state=True, save=save, backend="gluon", **options)
    with torch.no_grad():
        state = torch.zeros(inputs.final_rows, x["v"].shape[2], 128, 128)
        saved = torch.zeros_like(inputs.new_outputs()[2])
        x["do"], x["d_final_state"], x["saved"] = torch.zeros_like(x["v"]), state, saved
        return library.call_backward(x["do"], state, saved, inputs)


def ran(phase: str) -> list[str]:
    return [
        each.program.removesuffix("_kernel") for each in launch.records() if each.phase == phase
    ]


STAGES = ["activate", "prepare", "summarize", "fold", "scan"]
ADJOINT_STAGES = ["adjoint_summarize", "fold", "adjoint_scan", "gradients"]
MADE_AGAIN = {"none": ["prepare", "summarize", "fold", "scan"], "light": ["prepare", "scan"]}


def test_forward_launches_each_stage_once_and_says_so(kernels):
    for _ in range(2):
        forward(problem([1600, 100]))
    assert ran("forward") == STAGES
    records = [each for each in launch.records() if each.phase == "forward"]
    assert [each.count for each in records] == [1] * 5
    found = [(name, grid) for name, grid, _ in kernels.launched]
    assert found[5:] == found[:5] == [(each.program, each.grid) for each in records]


def test_forward_without_splits_or_raw_inputs_launches_two_kernels(kernels):
    forward(problem([100, 33], raw=False))
    assert ran("forward") == ["prepare", "scan"]


@pytest.mark.parametrize("save", ["none", "light", "full"])
@pytest.mark.parametrize("raw", [False, True])
def test_backward_launches_what_was_not_kept_and_each_stage_of_its_own_once(kernels, save, raw):
    for _ in range(4):
        backward(problem([1600, 100], raw=raw), save)
        stages = MADE_AGAIN.get(save, []) + ADJOINT_STAGES
        if raw:
            stages = ["activate", *stages, "adjoint_activate", "adjoint_activate_sums"]
        assert ran("backward") == stages


def test_forward_from_what_is_kept_passes_what_a_fresh_one_passes(kernels):
    x = problem([1600, 100]) | {"initial_state": torch.zeros(2, 2, 128, 128)}
    for _ in range(2):
        forward(x, output_final_state=True)
    with launch.fresh():
        forward(x, output_final_state=True)
    assert len(kernels.compiled) == 2 * len(STAGES)
    assert kernels.launched[5:10] == kernels.launched[10:]


FLAGS = {
    "raw": (True, {}),
    "states": (False, {"output_final_state": True}),
    "value first": (True, {"output_final_state": True, "state_v_first": True}),
    "all tapes": (False, {"save": "full"}),
}


@pytest.mark.parametrize(("raw", "options"), FLAGS.values(), ids=FLAGS)
def test_recorded_forward_passes_what_its_stages_would_pass(kernels, raw, options):
    """To each launch the places, in its own buffers, that stages pass in theirs."""

    held = []

    def places() -> list[list[Any]]:
        x = problem([1600, 100], raw=raw) | {"initial_state": torch.zeros(2, 2, 128, 128)}
        kernels.passed.clear()
        kernels.spaces.clear()
        found = forward(x, **options)
        x |= {"o": found.o, "final": found.final_state, "saved": found.saved.tensor}
        known = {y.data_ptr() for y in x.values() if isinstance(y, Tensor)}
        for space in kernels.spaces:
            if space.data_ptr() not in {0, *known}:
                x["space"] = space
        held.append(x)  # so that every call has addresses of its own
        return kernels.places({name: y for name, y in x.items() if isinstance(y, Tensor)})

    by_stages, watched, recorded, again = [places() for _ in range(4)]
    named = {x[0] for x in itertools.chain(*by_stages) if isinstance(x, tuple) and len(x) == 2}
    assert {"g", "beta", "initial_state"} <= named
    assert named & {"space", "saved"}
    assert by_stages == watched == recorded == again


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("options", [{}, {"state_v_first": True}, {"save": "full"}], ids=str)
def test_recorded_backward_passes_what_its_stages_would_pass(kernels, raw, options):
    held = []

    def places() -> list[list[Any]]:
        x = problem([1600, 100], raw=raw) | {"initial_state": torch.zeros(2, 2, 128, 128)}
        given = dict(x)
        kernels.passed.clear()
        kernels.spaces.clear()
        found = backward(given, **options)
        given |= {f"gradient {i}": y for i, y in enumerate(found)}
        known = {y.data_ptr() for y in given.values() if isinstance(y, Tensor)}
        spaces = [y for y in kernels.spaces if y.numel() and y.data_ptr() not in known]
        given |= {f"space {i}": y for i, y in enumerate(sorted(spaces, key=Tensor.numel))}
        held.append(given)  # so that every call has addresses of its own
        return kernels.places({n: y for n, y in given.items() if isinstance(y, Tensor)})

    by_stages, watched, recorded, again = [places() for _ in range(4)]
    named = {x[0] for x in itertools.chain(*by_stages) if isinstance(x, tuple) and len(x) == 2}
    assert {"beta", *(f"gradient {i}" for i in range(2, 6))} <= named
    assert by_stages == watched == recorded == again


def test_recorded_backward_runs_no_stage(kernels, monkeypatch):
    for _ in range(2):
        backward(problem([1600, 100]))
    monkeypatch.setattr(library._backward, "backward", None)
    launched = len(kernels.launched)
    backward(problem([1600, 100]))
    assert len(kernels.launched) == launched + launched // 2


def test_recorded_forward_runs_no_stage(kernels, monkeypatch):
    for _ in range(2):
        forward(problem([1600, 100]))
    monkeypatch.setattr(library._forward, "forward", None)
    forward(problem([1600, 100]))
    assert len(kernels.launched) == 3 * len(STAGES)


def test_other_lengths_and_documents_compile_nothing_anew(kernels):
    for lengths in ([1600, 100], [1601], [700, 33, 900, 5], [64 * 40]):
        forward(problem(lengths))
    assert len(kernels.compiled) == len(set(kernels.compiled))


class Allocations(TorchDispatchMode):
    """What is allocated while it is on, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in held:
            self.found.append(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return result


def test_forward_allocates_its_results_and_one_workspace(kernels):
    x = problem([1600, 100])
    forward(x)
    inputs = inputs_of(**x, output_final_state=True, save="light", backend="gluon")
    with Allocations() as allocations:
        library._forward_impl(*inputs)
    assert allocations.found == ["empty"] * 4


def test_copies_of_inputs_are_held_until_they_have_been_launched_on(kernels):
    x = problem([1600, 100], raw=False)
    x |= {name: torch.stack([x[name]] * 2, -1)[..., 0] for name in "qkv"}
    for _ in range(2):
        forward(x)
    names = [name.removesuffix("_kernel") for name, _, _ in kernels.launched]
    assert names == 2 * STAGES[1:]


BUFFER = torch.arange(15 * 4 * 128 + 8).to(torch.bfloat16)
ROWS = BUFFER[:-8].view(15, 4, 128)
READ_IN_PLACE = {"whole": ROWS, "heads of a projection": ROWS[:, 1:3], "every other row": ROWS[::2]}
COPIED = {
    "odd address": BUFFER[1:-7].view(15, 4, 128),
    "odd rows": BUFFER[: 14 * 516].view(14, 516)[:, :512].view(14, 4, 128),
    "one row for all": ROWS[:1].expand(9, 4, 128),
    "strided last axis": torch.stack([ROWS, ROWS], -1)[..., 0],
    "another dtype": ROWS.float(),
}


@pytest.mark.parametrize("x", READ_IN_PLACE.values(), ids=READ_IN_PLACE.keys())
def test_what_the_copy_engine_can_read_is_read_in_place(x):
    assert in_place(x) is x


@pytest.mark.parametrize("x", COPIED.values(), ids=COPIED.keys())
def test_what_the_copy_engine_cannot_read_is_copied_to_where_it_can(x):
    found = in_place(x)
    assert torch.equal(found, x.to(torch.bfloat16))
    assert found.is_contiguous()
    assert found.data_ptr() % 16 == 0


def adjoint_arguments(name: str, plan: Walk, H: int, HV: int, rows: int) -> dict[str, Any]:
    """Tensors of a stage of the backward by their names in the ABI; what they hold is not read."""

    def like(name: str, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape(name, Counts.of(plan), HV, 128, 128), dtype=dtype)

    wide = dict.fromkeys(("G", "bound", "dS_border"), torch.float32)
    made = {n: like(n, wide.get(n, torch.bfloat16)) for n in ("S", "Uh", "dS", "dR", *wide)}
    made["Z"] = like("Z", torch.float16)
    made |= {n: torch.zeros(rows, H, 128, dtype=torch.bfloat16) for n in ("q", "k", "dq", "dk")}
    made |= {n: torch.zeros(rows, HV, 128, dtype=torch.bfloat16) for n in ("do", "dv")}
    made |= {n: torch.zeros(rows, HV) for n in ("g", "beta", "dg", "dbeta")}
    states = ("d_final_state", "d_initial_state")
    made |= {n: torch.zeros(plan.documents, HV, 128, 128) for n in states}
    made |= {"tables": Tables(plan, CPU), "scale": 0.1}
    return {each: made[each] for each in inspect.signature(BACKWARD[name]).parameters}


BACKWARD = {each.__name__: each for each in (adjoint_summarize, adjoint_scan, gradients)}


@pytest.mark.parametrize("name", BACKWARD)
def test_kernel_of_the_backward_is_launched_once_with_every_argument_it_names(kernels, name):
    plan = walk((0, 1600, 1700), 4)
    arguments = adjoint_arguments(name, plan, 2, 4, 1700)
    for _ in range(2):
        with launch.Scope("backward", CPU):
            BACKWARD[name](**arguments)
    assert kernels.compiled == [f"{name}_kernel"]
    first, again = kernels.launched
    assert again == first
    _, grid, passed = first
    entering = sum(segment.enter >= 0 for segment in plan.segments)
    tasks = {
        "adjoint_summarize": 4 * entering,
        "adjoint_scan": 2 * 4 * len(plan.segments),  # in halves
        "gradients": 2 * plan.chunks,
    }
    assert grid == tasks[name]
    module = sys.modules[BACKWARD[name].__module__]
    assert len(passed) == len(getattr(module, f"{name}_kernel").arg_names)


def test_walks_of_the_backward_know_where_they_start_and_end():
    plan = walk((0, 1600, 1700), 4)
    tables = DeviceTables(Tables(plan, CPU))
    rows = {row[0]: row for row in tables.scan.rows.tolist()}
    entered = {row[0]: row for row in tables.adjoint_summarize.rows.tolist()}
    for s in plan.segments:
        wanted = [s.first_chunk, s.chunks, s.start, s.end, s.enter, s.leave, 0, 0]
        assert rows[s.first_chunk] == wanted
        if s.enter >= 0:
            wanted = [s.first_chunk, s.chunks, s.end, 0, s.enter, 0, 0, 0]
            assert entered.pop(s.first_chunk) == wanted
    assert not entered
