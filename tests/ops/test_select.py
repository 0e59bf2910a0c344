"""Which backend runs, and why the others do not."""

import warnings

import pytest
import torch

from longdelta import InvalidInput, UnsupportedProblem, support
from longdelta.kernels import eager
from longdelta.ops import select, self_test
from longdelta.ops.select import selected, stages
from longdelta.runtime.toolchain import TRITON_CHECKED

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_support_names_the_eager_backend_on_a_cpu_and_says_why_not_the_other(dtype):
    found = support(device="cpu", dtype=dtype, head_k_dim=7)
    assert found.backend == "eager"
    assert "the tensors are on cpu" in found.reasons["gluon"]


def test_support_of_a_backend_by_name_leaves_the_reason_that_it_was_asked_for():
    assert support(device="cpu", backend="eager").reasons == {"gluon": "was not asked for"}


def test_support_refuses_a_backend_that_cannot_run_with_its_reason_and_a_way_out():
    with pytest.raises(UnsupportedProblem, match=r"Hopper .*Use backend='auto' or 'eager'"):
        support(device="cpu", backend="gluon")


def test_support_refuses_an_unknown_backend_by_name():
    with pytest.raises(InvalidInput, match=r"backend must be one of .*got 'fast'"):
        support(backend="fast")


def test_support_refuses_a_device_that_torch_does_not_find():
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(InvalidInput, match=f"device must be .* {absent[5:]} GPUs .*got '{absent}'"):
        support(device=absent)


def test_stages_of_the_eager_backend_are_its_module():
    assert stages("eager") is eager


@pytest.fixture
def hopper(monkeypatch):
    """As if there were a Hopper GPU on which everything is as it must be."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(select, "triton_version", lambda: f"{TRITON_CHECKED[0]}.0")
    monkeypatch.setattr(self_test, "fault", lambda device: None)
    monkeypatch.setattr(select, "_selected", {})
    select._say_once.cache_clear()
    yield
    select._say_once.cache_clear()


@pytest.mark.parametrize("release", TRITON_CHECKED)
def test_support_takes_every_release_of_triton_that_was_checked(hopper, monkeypatch, release):
    monkeypatch.setattr(select, "triton_version", lambda: f"{release}.7")
    assert support(device=CUDA).backend == "gluon"


WHY_NOT = {
    "no Triton": (select, "triton_version", lambda: None, "3.6, .*none is installed"),
    "another Triton": (select, "triton_version", lambda: "3.5.1", r"3.6, .*3.9 .*found 3\.5\.1"),
    "another GPU": (torch.cuda, "get_device_capability", lambda device: (8, 0), "NVIDIA A100"),
    "a failed test": (self_test, "fault", lambda device: "failed its self-test", "self-test"),
}


@pytest.mark.parametrize(("where", "name", "value", "reason"), WHY_NOT.values(), ids=WHY_NOT)
def test_auto_says_once_why_it_leaves_gluon_and_gluon_by_name_raises_it(
    hopper, monkeypatch, where, name, value, reason
):
    monkeypatch.setattr(where, name, value)
    with pytest.warns(UserWarning, match=f"runs its eager backend: gluon .*{reason}"):
        assert selected(CUDA, torch.bfloat16, 128, 128, "auto") == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selected(CUDA, torch.bfloat16, 128, 128, "auto") == "eager"
        assert selected(CUDA, torch.bfloat16, 128, 128, "eager") == "eager"
    with pytest.raises(UnsupportedProblem, match=f"{reason}.*Use backend='auto' or 'eager'"):
        selected(CUDA, torch.bfloat16, 128, 128, "gluon")


@pytest.mark.parametrize(
    ("dtype", "K", "reason"),
    [(torch.float16, 128, "takes bfloat16.*float16"), (torch.bfloat16, 64, "found K = 64")],
)
def test_auto_says_which_dtype_and_heads_gluon_takes(hopper, dtype, K, reason):
    with pytest.warns(UserWarning, match=reason):
        assert selected(CUDA, dtype, K, 128, "auto") == "eager"


def test_auto_takes_gluon_without_a_word_where_it_applies(hopper):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selected(CUDA, torch.bfloat16, 128, 128, "auto") == "gluon"
        assert selected(CUDA, torch.bfloat16, 128, 128, "gluon") == "gluon"


def test_a_backend_that_could_not_be_tested_yet_is_asked_for_again(hopper, monkeypatch):
    """A first call inside the capture of a graph; a failed test of the second one counts."""
    call = CUDA, torch.bfloat16, 128, 128, "auto"
    assert selected(*call) == "gluon"
    monkeypatch.setattr(self_test, "fault", lambda device: "failed its self-test")
    with pytest.warns(UserWarning, match="failed its self-test"):
        assert selected(*call) == "eager"


def test_nothing_is_said_on_a_cpu(monkeypatch):
    monkeypatch.setattr(select, "_selected", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selected(torch.device("cpu"), torch.bfloat16, 128, 128, "auto") == "eager"
