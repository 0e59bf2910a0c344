"""The test that a backend passes before it is used; on a CPU one that is wrong stands in for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from longdelta.errors import UnsupportedProblem
from longdelta.kernels import eager
from longdelta.kernels.stages import Backend
from longdelta.ops import self_test
from longdelta.ops.select import stages

CPU = torch.device("cpu")


def broken(stage: str, output: str, factor: float) -> Backend:
    """The eager backend, but for a factor in what one stage writes."""

    def wrong(*inputs, **outputs):
        getattr(eager, stage)(*inputs, **outputs)
        if outputs[output] is not None:
            outputs[output].mul_(factor)

    stages = {name: getattr(eager, name) for name in eager.__all__}
    return SimpleNamespace(**{**stages, stage: wrong})


PARTS = pytest.mark.parametrize("part", self_test.COMPARED)


def judged(backend: Backend) -> str | None:
    """What the first part that finds anything says."""
    found = (
        self_test.judged(lambda part=part: self_test.errors("eager", backend, CPU, part))
        for part in self_test.COMPARED
    )
    return next(filter(None, found), None)


@PARTS
def test_errors_of_the_reference_itself_are_zero(part):
    errors = self_test.errors("eager", eager, CPU, part)
    assert tuple(errors) == self_test.COMPARED[part]
    assert not any(errors.values())


@pytest.mark.parametrize(
    ("stage", "output"),
    [
        ("activate", "g"),
        ("activate", "k_unit"),
        ("prepare", "G"),
        ("prepare", "Z"),
        ("summarize", "S_border"),
        ("summarize", "M"),
        ("fold", "S"),
        ("scan", "o"),
        ("scan", "final_state"),
        ("scan", "S"),
        ("scan", "Uh"),
        ("adjoint_summarize", "dS_border"),
        ("adjoint_fold", "dS"),
        ("adjoint_scan", "dS"),
        ("adjoint_scan", "dR"),
        ("adjoint_scan", "d_initial_state"),
        ("gradients", "dq"),
        ("gradients", "dg"),
    ],
)
def test_a_wrong_stage_is_found(stage, output):
    assert "relative errors of" in judged(broken(stage, output, 1.5))


def test_nan_is_an_error():
    assert judged(broken("scan", "o", float("nan"))) == "relative errors of o nan"


def test_a_stage_that_raises_is_named_by_its_error():
    def fails(*inputs, **outputs):
        raise RuntimeError("no kernel image\nand much more")

    backend = SimpleNamespace(**{**vars(broken("scan", "o", 1.0)), "fold": fails})
    assert judged(backend) == "RuntimeError: no kernel image"


def test_memory_that_does_not_suffice_is_no_fault_of_the_kernels():
    def fails(*inputs, **outputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    backend = SimpleNamespace(**{**vars(broken("scan", "o", 1.0)), "fold": fails})
    with pytest.raises(torch.OutOfMemoryError):
        judged(backend)


def test_it_runs_outside_of_whatever_the_caller_is_inside_of():
    def seen() -> dict[str, float]:
        assert threading.current_thread() is not threading.main_thread()
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert type(torch.zeros(1)) is torch.Tensor
        return self_test.errors("eager", eager, CPU, "backward")

    fake = torch._subclasses.FakeTensorMode()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), fake:
        assert self_test.judged(seen) is None


def test_under_compile_it_runs_on_real_tensors():
    """As the operators' fake implementations call it, while a graph is being traced."""
    found = []

    @torch.library.custom_op("longdelta_test::ask", mutates_args=())
    def ask(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @ask.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        found.append(judged(eager))
        return x.new_empty(x.shape)

    torch.compile(lambda x: ask(x) + 1, backend="eager", fullgraph=True)(torch.zeros(2))
    assert found
    assert not any(found)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A stand-in for a GPU and its toolchain; counts the tests that it is put to."""
    state = SimpleNamespace(runs=0, result=None, capturing=False)

    def judged(test):
        state.runs += 1
        return state.result

    monkeypatch.setattr(self_test, "_faults", {})
    monkeypatch.setattr(self_test, "judged", judged)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        self_test.toolchain, "described", lambda: {"triton": "3.6.0", "ptxas": "12.8.93"}
    )
    monkeypatch.setattr(self_test.toolchain, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv(self_test.OPT_OUT, raising=False)
    return state


def next_process(monkeypatch) -> None:
    monkeypatch.setattr(self_test, "_faults", {})


def test_a_pass_is_remembered_in_the_process_and_on_disk(gpu, monkeypatch, tmp_path):
    assert self_test.fault(CPU) is None
    assert self_test.fault(CPU) is None
    next_process(monkeypatch)
    assert self_test.fault(CPU) is None
    assert gpu.runs == 1
    assert len(list((tmp_path / "cache").glob("longdelta-self-test-*.json"))) == 1


def test_a_failure_names_the_toolchain_and_the_ways_out_and_is_tried_again_by_the_next_process(
    gpu, monkeypatch
):
    gpu.result = "relative errors of o 3.0e-01"
    reason = self_test.fault(CPU)
    for part in ("NVIDIA H200", "triton 3.6.0", "ptxas 12.8.93", gpu.result, "longdelta[ptxas]"):
        assert part in reason
    assert self_test.fault(CPU) == reason
    assert gpu.runs == 1
    next_process(monkeypatch)
    gpu.result = None
    assert self_test.fault(CPU) is None
    assert gpu.runs == 2


def test_the_backward_is_tested_at_the_first_backward_and_raises_where_it_fails(gpu):
    assert self_test.fault(CPU) is None
    assert gpu.runs == 1
    gpu.result = "relative errors of dq 3.0e-01"
    with pytest.raises(UnsupportedProblem, match=r"the backward of gluon failed its self-test.*dq"):
        self_test.require_backward(CPU)
    assert self_test.fault(CPU) is None
    assert gpu.runs == 2


def test_a_backward_that_passed_is_not_tested_again(gpu, monkeypatch):
    self_test.require_backward(CPU)
    self_test.require_backward(CPU)
    next_process(monkeypatch)
    self_test.require_backward(CPU)
    assert gpu.runs == 1


@pytest.mark.parametrize("what", ["gpu", "ptxas", "kernels"])
def test_another_gpu_toolchain_or_text_of_the_kernels_is_tested_anew(gpu, monkeypatch, what):
    self_test.fault(CPU)
    next_process(monkeypatch)
    if what == "gpu":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    elif what == "ptxas":
        monkeypatch.setattr(self_test.toolchain, "described", lambda: {"ptxas": "13.5.37"})
    else:
        monkeypatch.setattr(self_test, "_text_of_package", lambda: ["other"])
    self_test.fault(CPU)
    assert gpu.runs == 2


def test_a_folder_that_cannot_be_written_costs_only_the_memory(gpu, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert self_test.fault(CPU) is None
    next_process(monkeypatch)
    assert self_test.fault(CPU) is None
    assert gpu.runs == 2


def test_a_ptxas_that_does_not_run_is_a_reason_and_no_error(gpu, monkeypatch):
    def described():
        raise OSError("Exec format error")

    monkeypatch.setattr(self_test.toolchain, "described", described)
    assert "needs a ptxas that runs" in self_test.fault(CPU)
    assert gpu.runs == 0


def test_deterministic_algorithms_are_put_aside_for_the_test_alone():
    torch.use_deterministic_algorithms(True, warn_only=True)
    with self_test._deterministic_or_not():
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_the_variable_leaves_it_out(gpu, monkeypatch):
    monkeypatch.setenv(self_test.OPT_OUT, "0")
    gpu.result = "wrong"
    assert self_test.fault(CPU) is None
    assert gpu.runs == 0


def test_a_capture_is_left_alone_and_the_next_call_tests(gpu):
    gpu.capturing = True
    assert self_test.fault(CPU) is None
    assert gpu.runs == 0
    gpu.capturing = False
    self_test.fault(CPU)
    assert gpu.runs == 1


@PARTS
@pytest.mark.gpu
def test_the_hopper_kernels_pass_on_this_machine(part):
    """Here, because support() turns a failure into another backend, and other tests are skipped."""
    gpu = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(gpu) != (9, 0):
        pytest.skip("not a Hopper GPU")
    gluon = stages("gluon")
    assert self_test.judged(lambda: self_test.errors("gluon", gluon, gpu, part)) is None
