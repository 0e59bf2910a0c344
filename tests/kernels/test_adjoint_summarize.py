import pytest
import torch

from longdelta.testing.stages import run_stage


def operands(case, cotangent):
    tensors = (case.q, case.k, case.beta, case.do, *case.given("G", "Z", "bound"))
    return (*tensors, cotangent, case.scale, case.tables)


@pytest.mark.parametrize("name", ["split_documents", "split_reflections", "split_groups"])
def test_adjoint_summarize_gives_the_references_cotangents(backend, case_of, name):
    case = case_of(name)
    outputs = case.poisoned("dS_border")
    run_stage(backend.adjoint_summarize, *operands(case, case.d_final_state), **outputs)
    case.check(dS_ext=outputs["dS_border"])


def test_adjoint_summarize_takes_a_missing_cotangent_for_zeros_bitwise(backend, case_of):
    case = case_of("split_documents")
    found = []
    for cotangent in (None, torch.zeros_like(case.d_final_state)):
        outputs = case.poisoned("dS_border")
        run_stage(backend.adjoint_summarize, *operands(case, cotangent), **outputs)
        found.append(outputs["dS_border"])
    assert found[0].isfinite().all()
    assert torch.equal(*found)
