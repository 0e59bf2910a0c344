import pytest
import torch

from longdelta.testing.stages import run_stage

CASES = [
    "mild",  # ragged tails, an empty document, rows after the last one
    "no_decay",
    "beta_zero",
    "beta_up_to_two",
    "groups_of_one",
    "groups_of_three",
    "one_chunk",
    "ragged_tails",
    "split_documents",  # segments that enter by a border
    "split_groups",
]


def operands(case):
    tapes = case.given("G", "Z", "S_border")
    return (case.q, case.k, case.v, case.beta, *tapes, case.initial_state, case.scale, case.tables)


@pytest.mark.parametrize("name", CASES)
def test_scan_gives_the_references_outputs_states_and_tapes(backend, case_of, name):
    case = case_of(name)
    outputs = case.poisoned("o", "final_state", "S", "Uh")
    case.check(**run_stage(backend.scan, *operands(case), **outputs))


@pytest.mark.parametrize("name", ["model", "strong_20", "strong_120"])
def test_scan_gives_the_references_outputs_under_strong_decay(backend, case_of, name):
    case = case_of(name)
    outputs = case.poisoned("o", "final_state", "S", "Uh")
    run_stage(backend.scan, *operands(case), **outputs)
    case.check(**outputs)


def test_scan_gives_the_same_bits_with_and_without_tapes_and_outputs(backend, case_of):
    case = case_of("split_documents")
    full = run_stage(backend.scan, *operands(case), **case.poisoned("o", "final_state", "S", "Uh"))
    forward = case.poisoned("o", "final_state")
    backend.scan(*operands(case), **forward, S=None, Uh=None)
    tapes = case.poisoned("S", "Uh")
    backend.scan(*operands(case), o=None, final_state=None, **tapes)
    for name, x in (forward | tapes).items():
        assert torch.equal(x, full[name]), name


def test_scan_takes_a_missing_initial_state_for_zeros_bitwise(backend, case_of):
    case = case_of("mild")
    found = []
    for state in (None, torch.zeros_like(case.initial_state)):
        *head, _, scale, tables = operands(case)
        outputs = case.poisoned("o", "final_state", "S", "Uh")
        found.append(run_stage(backend.scan, *head, state, scale, tables, **outputs))
    assert torch.equal(found[0]["o"], found[1]["o"])
    assert torch.equal(found[0]["S"], found[1]["S"])
