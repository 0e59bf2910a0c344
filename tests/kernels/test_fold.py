import pytest
import torch

SPLIT = ["split_documents", "split_reflections", "split_groups"]


@pytest.mark.parametrize("name", SPLIT)
def test_fold_turns_summaries_into_the_references_states(backend, case_of, name):
    case = case_of(name)
    *M, S = case.given("M", "M_bound", "S_ext")
    backend.fold(*M, case.tables, case.tables.walk.chains, S=S)
    case.check(S_border=S)


@pytest.mark.parametrize("name", SPLIT)
def test_adjoint_fold_turns_adjoint_summaries_into_the_references_cotangents(
    backend, case_of, name
):
    case = case_of(name)
    *M, dS = case.given("M", "M_bound", "dS_ext")
    backend.adjoint_fold(*M, case.tables, case.tables.walk.chains, dS=dS)
    case.check(dS_border=dS)


def test_fold_leaves_the_state_after_a_first_segment_as_it_is(backend, case_of):
    case = case_of("split_documents")
    *M, S = case.given("M", "M_bound", "S_ext")
    before = S.clone()
    backend.fold(*M, case.tables, case.tables.walk.chains, S=S)
    first = [s.leave for s in case.tables.walk.segments if s.leave >= 0 and s.map < 0]
    middle = [s.leave for s in case.tables.walk.segments if s.map >= 0]
    assert torch.equal(S[first], before[first])
    assert not torch.equal(S[middle], before[middle])


def test_fold_of_no_chains_changes_nothing(backend, case_of):
    case = case_of("split_documents")
    *M, S = case.given("M", "M_bound", "S_ext")
    before = S.clone()
    backend.fold(*M, case.tables, (), S=S)
    backend.adjoint_fold(*M, case.tables, (), dS=S)
    assert torch.equal(S, before)
