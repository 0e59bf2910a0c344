import pytest
import torch

from longdelta.testing.budgets import assert_within, budget
from longdelta.testing.stages import StageCase, run_stage
from longdelta.testing.workloads import BITS_BY_DOCUMENT, NAMED, Workload


@pytest.mark.parametrize(
    "name",
    [
        "mild",  # ragged tails, an empty document, rows after the last one
        "no_decay",
        "beta_zero",
        "beta_up_to_two",
        "correlated_keys",
        "nearly_equal_keys",  # the inverse is far from a short power series
        "groups_of_one",
        "groups_of_three",  # K is no multiple of 16, HV is no power of two
        "one_chunk",
        "ragged_tails",
    ],
)
def test_prepare_matches_the_reference_and_writes_every_element(backend, case_of, name):
    case = case_of(name)
    outputs = case.poisoned("G", "Z", "bound")
    case.check(**run_stage(backend.prepare, case.k, case.g, case.beta, case.tables, **outputs))


@pytest.mark.parametrize("name", ["model", "strong_20", "strong_120", "reset"])
def test_prepare_floors_gates_at_minus_87_and_matches_under_strong_decay(backend, case_of, name):
    case = case_of(name)
    outputs = case.poisoned("G", "Z", "bound")
    run_stage(backend.prepare, case.k, case.g, case.beta, case.tables, **outputs)
    assert outputs["G"].isfinite().all()
    case.check(**outputs)


def test_prepare_inverts_the_chunk_to_working_precision_for_equal_keys(backend, machine):
    # All keys equal and beta = 1: I + tril(1, -1), whose inverse is bidiagonal.
    case = StageCase(NAMED["one_chunk"], torch.float32, machine)
    keys = torch.zeros_like(case.k)
    keys[..., 0] = 1
    outputs = case.poisoned("G", "Z", "bound")
    run_stage(backend.prepare, keys, case.g, torch.ones_like(case.beta), case.tables, **outputs)
    lower = torch.diag_embed(-torch.ones(63, dtype=torch.float64), offset=-1)
    ref = lower.expand_as(outputs["Z"])
    allowed = budget(case.budgets, "Z", outputs["Z"].dtype)
    assert_within("Z", outputs["Z"], ref, allowed)


@pytest.mark.parametrize("machine", BITS_BY_DOCUMENT, indirect=True, ids=str)
def test_prepare_gives_a_chunk_the_same_bits_alone_and_among_others(backend, machine):
    many = StageCase(Workload(lengths=(64,) * 9, tail=0), torch.float32, machine)
    one = StageCase(Workload(lengths=(64,), tail=0), torch.float32, machine)
    rows = slice(4 * 64, 5 * 64)
    all_of_them, alone = many.poisoned("G", "Z", "bound"), one.poisoned("G", "Z", "bound")
    run_stage(backend.prepare, many.k, many.g, many.beta, many.tables, **all_of_them)
    taken = (many.k[rows], many.g[rows], many.beta[rows])
    run_stage(backend.prepare, *taken, one.tables, **alone)
    assert torch.equal(all_of_them["G"][4], alone["G"][0])
    assert torch.equal(all_of_them["Z"][4], alone["Z"][0])
