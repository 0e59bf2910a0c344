import pytest

from longdelta.testing.stages import run_stage
from longdelta.testing.workloads import NAMED

OUTPUTS = ("dq", "dk", "dv", "dg", "dbeta")


def operands(case):
    inputs = (case.q, case.k, case.g, case.beta, case.do)
    return (*inputs, *case.given("G", "S", "Uh", "dS", "dR"), case.scale, case.tables)


@pytest.mark.parametrize(
    "name",
    [
        "mild",
        "no_decay",
        "beta_zero",
        "beta_up_to_two",
        "groups_of_one",
        "groups_of_three",  # dq and dk are sums over three value heads
        "one_chunk",
        "ragged_tails",
        "split_documents",
        "split_groups",
    ],
)
def test_gradients_match_the_reference_and_write_every_row(backend, case_of, name):
    case = case_of(name)
    case.check(**run_stage(backend.gradients, *operands(case), **case.poisoned(*OUTPUTS)))


@pytest.mark.parametrize("name", ["model", "strong_6", "strong_20", "strong_120", "reset"])
def test_gradients_match_the_reference_under_strong_decay_relative_to_a_mild_gate_gradient(
    backend, machine, case_of, name
):
    case = case_of(name)
    outputs = run_stage(backend.gradients, *operands(case), **case.poisoned(*OUTPUTS))
    case.check({"dg": machine.expected(NAMED["mild"]).dg}, **outputs)


@pytest.mark.parametrize("name", ["strong_120", "reset"])
def test_gradients_give_no_gate_gradient_on_or_below_the_floor(backend, case_of, name):
    case = case_of(name)
    outputs = run_stage(backend.gradients, *operands(case), **case.poisoned(*OUTPUTS))
    floored = case.g <= -87
    assert floored.any()
    assert not outputs["dg"][floored].any()
