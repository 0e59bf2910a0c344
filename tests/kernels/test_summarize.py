import pytest
import torch

from longdelta.plan import chunks
from longdelta.testing.stages import StageCase, run_stage
from longdelta.testing.workloads import Workload

SPLIT = ["split_documents", "split_reflections", "split_groups"]


@pytest.mark.parametrize("name", SPLIT)
def test_summarize_gives_the_references_states_and_maps(backend, case_of, name):
    case = case_of(name)
    outputs = case.poisoned("S_border", "M", "M_bound")
    operands = (case.k, case.v, case.beta, *case.given("G", "Z", "bound"), case.initial_state)
    run_stage(backend.summarize, *operands, case.tables, **outputs)
    case.check(S_ext=outputs.pop("S_border"), **outputs)


def test_summarize_takes_a_missing_initial_state_for_zeros_bitwise(backend, case_of):
    case = case_of("split_documents")
    found = []
    for state in (None, torch.zeros_like(case.initial_state)):
        outputs = case.poisoned("S_border", "M", "M_bound")
        operands = (case.k, case.v, case.beta, *case.given("G", "Z", "bound"), state)
        found.append(run_stage(backend.summarize, *operands, case.tables, **outputs))
    assert torch.equal(found[0]["S_border"], found[1]["S_border"])
    assert torch.equal(found[0]["M"], found[1]["M"])
    assert found[0]["S_border"].isfinite().all()


@pytest.mark.parametrize(
    "gate",
    [
        -0.3,  # the last two chunks of a segment count
        -0.0022,  # 143 do: more than are looked at in one go
        -0.001,  # all do, and the state that enters
    ],
)
def test_summarize_leaves_out_of_long_segments_only_what_is_forgotten(
    backend, machine, monkeypatch, gate
):
    monkeypatch.setattr(chunks, "segment_chunks", lambda tokens, HV, packed: 160)
    work = Workload(lengths=(321 * 64,), gates=gate, betas=0.02, H=1, HV=1, tail=0)
    case = StageCase(work, torch.float32, machine)
    outputs = case.poisoned("S_border", "M", "M_bound")
    operands = (case.k, case.v, case.beta, *case.given("G", "Z", "bound"), case.initial_state)
    run_stage(backend.summarize, *operands, case.tables, **outputs)
    one = torch.eye(outputs["M"].shape[-1])  # beside it a forgotten M may be 0
    scales = {"M": one} if gate < -0.002 else {}
    case.check(scales, S_ext=outputs.pop("S_border"), **outputs)
