"""Which backend runs, and why the others do not."""

import pytest
import torch

from longdelta import InvalidInput, UnsupportedProblem, support
from longdelta.kernels import eager
from longdelta.ops.select import stages


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


def test_stages_of_the_eager_backend_are_its_module():
    assert stages("eager") is eager
