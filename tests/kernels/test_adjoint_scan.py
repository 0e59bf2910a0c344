import pytest
import torch

from longdelta.testing.stages import run_stage
from longdelta.testing.workloads import NAMED


def operands(case, cotangent):
    tapes = case.given("G", "Z", "dS_border")
    tensors = (case.q, case.k, case.beta, case.do, *tapes)
    return (*tensors, cotangent, case.scale, case.tables)


@pytest.mark.parametrize(
    "name",
    [
        "mild",
        "no_decay",
        "beta_zero",
        "beta_up_to_two",
        "groups_of_one",
        "groups_of_three",
        "one_chunk",
        "ragged_tails",
        "split_documents",  # segments that are left through a border
        "split_groups",
    ],
)
def test_adjoint_scan_gives_the_references_tapes_and_state_gradients(backend, case_of, name):
    case = case_of(name)
    outputs = case.poisoned("dS", "dR", "d_initial_state")
    run_stage(backend.adjoint_scan, *operands(case, case.d_final_state), **outputs)
    case.check(**outputs)


@pytest.mark.parametrize("name", ["model", "strong_20", "strong_120"])
def test_adjoint_scan_gives_the_references_tapes_under_strong_decay(
    backend, machine, case_of, name
):
    case = case_of(name)
    outputs = case.poisoned("dS", "dR", "d_initial_state")
    run_stage(backend.adjoint_scan, *operands(case, case.d_final_state), **outputs)
    mild = machine.expected(NAMED["mild"]).d_initial_state
    case.check({"d_initial_state": mild}, **outputs)


def test_adjoint_scan_writes_no_state_gradient_where_nobody_asks_and_the_same_tapes(
    backend, case_of
):
    case = case_of("mild")
    asked, not_asked = case.poisoned("dS", "dR", "d_initial_state"), case.poisoned("dS", "dR")
    run_stage(backend.adjoint_scan, *operands(case, case.d_final_state), **asked)
    backend.adjoint_scan(*operands(case, case.d_final_state), **not_asked, d_initial_state=None)
    assert torch.equal(asked["dS"], not_asked["dS"])
    assert torch.equal(asked["dR"], not_asked["dR"])
