import pytest
import torch

from longdelta.testing.stages import run_stage

SPLIT = ["split_documents", "split_reflections", "split_groups"]


@pytest.mark.parametrize("name", SPLIT)
def test_summarize_gives_the_references_states_and_maps(backend, case_of, name):
    case = case_of(name)
    outputs = case.poisoned("S_border", "M")
    operands = (case.k, case.v, case.beta, *case.given("G", "Z"), case.initial_state)
    run_stage(backend.summarize, *operands, case.tables, **outputs)
    case.check(S_ext=outputs["S_border"], M=outputs["M"])


def test_summarize_takes_a_missing_initial_state_for_zeros_bitwise(backend, case_of):
    case = case_of("split_documents")
    found = []
    for state in (None, torch.zeros_like(case.initial_state)):
        outputs = case.poisoned("S_border", "M")
        operands = (case.k, case.v, case.beta, *case.given("G", "Z"), state)
        found.append(run_stage(backend.summarize, *operands, case.tables, **outputs))
    assert torch.equal(found[0]["S_border"], found[1]["S_border"])
    assert torch.equal(found[0]["M"], found[1]["M"])
    assert found[0]["S_border"].isfinite().all()
