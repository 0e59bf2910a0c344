"""Every variant of the Hopper kernels compiles for sm_90a, without a GPU, into what was tuned.

What came of each is printed at the end of the run (tests/conftest.py).
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton here")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from longdelta import chunk_gated_delta_rule
from longdelta.kernels import gluon
from longdelta.kernels.gluon import compile, machine_code
from longdelta.kernels.gluon.compile import VARIANTS, Report, Variant
from longdelta.ops import library, plans, select
from longdelta.runtime import launch, toolchain

NEWEST = Path(sys.prefix) / "triton-newest"
"""Where `make` puts the newest Triton; the environment itself has the oldest."""
SOURCE = Path(compile.__file__).parents[3]


def line(triton: str | None, found: dict[str, Any]) -> str:
    return (
        f"Triton {triton}  {found['name']:24} {found['registers']:4} registers"
        f"{found['spilled_bytes']:5} B spilled {found['shared_bytes']:8,} B shared"
        f"{found['code_bytes']:8,} B code {found['products']:3} wgmma {found['seconds']:5.1f} s"
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant_compiles_for_hopper_as_it_was_tuned(variant, record_property):
    found = compile.report(variant)
    record_property("kernel", line(toolchain.triton_version(), vars(found)))
    assert not found.faults(variant)


needs_newest = pytest.mark.skipif(not NEWEST.is_dir(), reason=f"no second Triton in {NEWEST}")


def under_newest(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(NEWEST), str(SOURCE)])
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},  # noqa: TID251
    )


@needs_newest
@pytest.mark.slow
def test_every_variant_compiles_under_the_newest_triton_too(record_property):
    done = under_newest(compile.__name__)
    assert done.returncode == 0, done.stderr
    found = [json.loads(text) for text in done.stdout.splitlines()]
    for one in found:
        record_property("kernel", line(one["triton"], one))
    assert {one["triton"] for one in found} == {newest_version()}
    assert [one["name"] for one in found] == [variant.name for variant in VARIANTS]
    assert not [(one["name"], fault) for one in found for fault in one["faults"]]


@needs_newest
@pytest.mark.slow
def test_launches_hold_under_the_newest_triton_too():
    folder = Path(__file__).parents[1] / "runtime"
    done = under_newest("pytest", "-q", "-p", "no:cacheprovider", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr


def newest_version() -> str:
    (found,) = metadata.distributions(name="triton", path=[str(NEWEST)])
    return found.version


@needs_newest
def test_the_newest_triton_is_the_last_that_the_backend_takes():
    assert newest_version().startswith(toolchain.TRITON_CHECKED[-1] + ".")


def test_the_gate_leaves_the_backends_stages_what_they_are():
    """A module of a stage's name, imported late, would take the place of the stage."""
    assert all(inspect.isfunction(getattr(gluon, name)) for name in gluon.__all__)


class Device:
    """A Hopper GPU as Triton sees one when it looks at a launch's arguments."""

    def get_current_target(self) -> GPUTarget:
        return compile.HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def gpu_of(monkeypatch) -> Iterator[Callable[[int], None]]:
    """Gives the GPU so many multiprocessors: on few a walk is not taken in halves."""
    properties = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def settle(multiprocessors: int) -> None:
        properties.multi_processor_count = multiprocessors
        launch.multiprocessors.cache_clear()
        plans._tables.cache_clear()

    settle(132)
    yield settle
    settle(0)


@pytest.fixture
def launched(monkeypatch, gpu_of) -> Iterator[set[str]]:
    """The Hopper backend on this machine; what its launches would compile, and none is made."""
    found: set[str] = set()

    def compiled(src, target, options) -> SimpleNamespace:
        found.add(key(src))
        return SimpleNamespace()

    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda kernel, *arguments, grid, warmup, **options: run(
            kernel, *arguments, grid=grid, warmup=True, **options
        ),
    )
    monkeypatch.setattr(triton.compiler, "compile", compiled)
    kernels = {variant.kernel for variant in VARIANTS}
    for kernel in kernels:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_stream", lambda device: 0)
    monkeypatch.setattr(launch, "call_of", lambda compiled, rest: (lambda *words: None, False))
    monkeypatch.setattr(launch.toolchain, "compiling", nullcontext)
    monkeypatch.setattr(select, "_gluon_reason", lambda *problem: None)
    monkeypatch.setattr(select, "_selected", {})
    monkeypatch.setattr(library, "require_backward", lambda device: None)
    monkeypatch.setattr(driver, "_active", Device())
    yield found
    for kernel in kernels:  # which keep the compiler that they found
        kernel.compile = triton.compile


def key(source: GluonASTSource) -> str:
    return f"{source.name} {source.hash()}"


RAW = {
    "ready": (),
    "all raw": ("norm", "gate", "sigmoid"),
    "norm": ("norm",),
    "norm, beta in bfloat16": ("norm", "beta"),
    "gates": ("gate", "sigmoid"),
}


def train(raw: tuple[str, ...], H: int, HV: int, states: bool, **options: Any) -> None:
    """One step of the usual dtypes: raw gates in bfloat16, others and all states in float32."""

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    T, half, wide = 1600, torch.bfloat16, torch.float32
    x = [leaf(1, T, heads, 128) for heads in (H, H, HV)]
    x.append(leaf(1, T, HV, dtype=half if "gate" in raw else wide))
    x.append(leaf(1, T, HV, dtype=half if {"beta", "sigmoid"} & {*raw} else wide))
    options |= {"backend": "gluon", "output_final_state": states}
    if states:
        options["initial_state"] = leaf(1, HV, 128, 128, dtype=wide)
    if "norm" in raw:
        options["use_qk_l2norm_in_kernel"] = True
    if "gate" in raw:
        options |= {name: leaf(HV, dtype=wide) for name in ("A_log", "dt_bias")}
        options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    results = [y for y in chunk_gated_delta_rule(*x, **options) if y is not None]
    torch.autograd.backward(results, [torch.zeros_like(y) for y in results])


@pytest.mark.parametrize("save", ["light", "full"])
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(("H", "HV"), [(16, 48), (2, 6)])
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_training_steps_launch_what_is_compiled_ahead(
    launched, gpu_of, save, raw, states, H, HV, multiprocessors
):
    gpu_of(multiprocessors)
    train(raw, H, HV, states, save=save)
    assert {each.split()[0] for each in launched} >= {
        "prepare_kernel",
        "scan_kernel",
        "adjoint_scan_kernel",
        "gradients_kernel",
    }
    assert launched <= {key(compile.source(variant)) for variant in VARIANTS}


def test_every_variant_is_launched_by_some_training_step(launched, gpu_of):
    for multiprocessors in (1, 132):
        gpu_of(multiprocessors)
        for raw in RAW.values():
            for states in (False, True):
                train(raw, 2, 6, states, save="light")
                train(raw, 2, 6, states, save="full")
        train((), 2, 6, True, state_v_first=True)
    unused = [v.name for v in VARIANTS if key(compile.source(v)) not in launched]
    assert not unused


SMALL = tuple(variant for variant in VARIANTS if variant.name.startswith("activate"))


@pytest.fixture
def small(monkeypatch, tmp_path) -> Path:
    """A cache of its own, and few kernels to compile into it."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(compile, "_started", {})
    monkeypatch.setattr(compile, "FORWARD", SMALL[:2])
    monkeypatch.setattr(compile, "BACKWARD", SMALL[2:])
    return tmp_path


def test_what_is_compiled_ahead_is_found_in_the_cache(small):
    for part in ("forward", "backward", "forward"):
        compile.ahead().wait(part)
    assert len(list(small.glob("*/*.cubin"))) == len(SMALL)
    assert len(compile._started) == 1


@pytest.mark.parametrize("executable", ["/bin/false", "/bin/true", "/no/such/python", "", None])
def test_nobody_waits_for_compilers_that_do_not_run(small, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    compile.ahead().wait("forward")
    compile.ahead().wait("backward")
    assert not list(small.iterdir())


def test_what_a_dying_compiler_leaves_is_compiled_by_the_others(small, monkeypatch):
    started, right = [], compile._worker

    def worker() -> subprocess.Popen[str]:
        started.append(sys.executable)
        if len(started) > 1:
            return right()
        pipe = subprocess.PIPE
        return subprocess.Popen(["/bin/false"], stdin=pipe, stdout=pipe, text=True)

    monkeypatch.setattr(compile, "_worker", worker)
    monkeypatch.setattr(compile, "_WORKERS", 2)
    compile.ahead().wait("backward")
    compile.ahead().wait("forward")
    if len(started) > 1:  # on one core there is one worker
        assert len(list(small.glob("*/*.cubin"))) == len(SMALL)


PTX = "griddepcontrol.wait; griddepcontrol.launch_dependents; ld.global.b32 %r1, [%rd1];"


@pytest.mark.parametrize(
    ("ptx", "follows"),
    [
        (PTX, True),
        (PTX.replace("griddepcontrol.wait;", ""), False),
        ("ld.global.b32 %r1, [%rd1]; " + PTX, False),
        ("cp.async.bulk.tensor.2d; " + PTX, False),
        ("ld.param.b64 %rd1, [x]; " + PTX, True),
        ("griddepcontrol.launch_dependents; griddepcontrol.wait; ld.global.b32;", False),
    ],
)
def test_a_kernel_follows_where_it_waits_before_all_else(ptx, follows):
    assert compile._follows(ptx) is follows


def test_variants_have_names_of_their_own():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_variant_without_a_type_for_an_argument_names_it():
    kernel = SimpleNamespace(arg_names=["k", "unheard_of"])
    with pytest.raises(AssertionError, match=r"odd: no type for \['unheard_of'\]"):
        compile.source(Variant("odd", kernel, 0))


GOOD = Report(
    "one",
    1.0,
    registers=128,
    spilled_bytes=16,
    shared_bytes=227 * 1024,
    products=8,
    follows=True,
)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spilled_bytes": 20}, "spills 20 bytes"),
        ({"shared_bytes": 227 * 1024 + 1}, "232449 bytes of shared memory"),
        ({"products": 4}, "4 wgmma instead of 8"),
        ({"serialised": 2}, "2 warnings of serialised products"),
        ({"follows": False}, "does not `follow` the kernel before it"),
        ({"late": 2}, "may be reading a buffer that it hands back, by 2 loads"),
        ({"failure": "does not compile: no such name"}, "does not compile: no such name"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_report_names_what_is_not_as_it_must_be(change, fault):
    variant = Variant("one", None, 8)
    assert GOOD.faults(variant) == []
    assert Report(**{**vars(GOOD), **change}).faults(variant) == [fault]


def test_loads_for_a_product_are_never_late_others_may_be_where_a_variant_says_so():
    variant = Variant("one", None, 8, others_handed_back=True)
    assert replace(GOOD, late=3).faults(variant) == []
    assert replace(GOOD, late=3, late_products=1).faults(variant) != []


RACE = """
    /*7570*/ LDSM.16.M88.4 R4, [R3+0x3800] ;
    /*7580*/ NOP ;
    /*7590*/ @!P2 SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR18+0x366e0], R2 ;
    /*75b0*/ ULEA UR18, UR8, UR4, 0x3 ;
    /*7620*/ HMMA.16816.F32.BF16 R20, R4.reuse, R22, R16 ;
"""
"""What ptxas made of gradients once: docs/log.md, 2026-11-30, a race in gradients."""
STORE = "/*7578*/ STS [R9], R7 ;"
ELSEWHERE = "/*7578*/ @P0 BRA `(.L_x_1) ; /*7579*/ BRA `(.L_x_2) ;"


@pytest.mark.parametrize(
    ("sass", "late"),
    [
        (RACE, (1, 1)),
        (RACE.replace("HMMA.16816.F32.BF16", "FADD"), (1, 0)),
        (RACE.replace("/*7580*/ NOP ;", STORE), (0, 0)),  # R7 is of the load
        (RACE.replace("/*7580*/ NOP ;", STORE.replace("R7", "R8")), (1, 1)),
        (RACE.replace("/*7580*/ NOP ;", ELSEWHERE), (0, 0)),
        (RACE.replace("LDSM.16.M88.4", "LDG.E.128"), (0, 0)),  # no shared memory
        (RACE.replace("/*7580*/ NOP ;", "/*7578*/ BRA.U UP0, `(.L_x_1) ;"), (1, 1)),
        (RACE.replace("/*7580*/ NOP ;", "/*7578*/ @P1 STS [R9], R7 ;"), (1, 1)),
        (RACE.replace("/*7580*/ NOP ;", "/*7578*/ STG.E.128 [R2.64], R20 ;"), (1, 1)),
        (RACE.replace("/*7580*/ NOP ;", "/*7578*/ HMMA.16816.F32.BF16 R8, R40, R2, R16 ;"), (1, 1)),
        (RACE.replace("/*75", "/*1075"), (1, 1)),  # more than a MiB of code
        ("/*0010*/ LDS RZ, [R3] ;" + RACE, (1, 1)),
    ],
    ids=[
        "race",
        "no product",
        "stored",
        "something else stored",
        "not this path",
        "global",
        "may go on",
        "may not be stored",
        "wide but apart",
        "another product",
        "long",
        "into nothing",
    ],
)
def test_loads_under_way_where_a_buffer_is_handed_back_are_found(sass, late):
    assert machine_code.late_loads(sass) == late
