"""Documents in one batch: boundaries, empty documents, rows after the last one, leaks."""

from dataclasses import replace

import pytest
import torch

from longdelta import chunk_gated_delta_rule
from longdelta.testing.budgets import EAGER, FLOAT64, assert_within
from longdelta.testing.workloads import (
    LEAVES,
    NAMED,
    Cotangents,
    Workload,
    assert_bitwise,
    assert_results,
    evaluate,
    expected,
    reference_results,
)


@pytest.mark.parametrize(
    "lengths",
    [
        (0, 5, 0, 0, 65, 0),  # repeated boundaries at every place
        (1, 1, 1),  # documents of one token
        (64, 128),  # no ragged chunk
    ],
    ids=str,
)
def test_documents_of_any_length_match_the_recurrence(run, lengths):
    work = Workload(lengths=lengths, tail=2)
    assert_results(run(work, torch.float64), expected(work), EAGER)


@pytest.mark.parametrize("tail", [0, 7])
def test_a_batch_of_empty_documents_passes_states_through_bitwise(run, tail):
    work = Workload(lengths=(0, 0), tail=tail)
    out = run(work, torch.float32)
    assert torch.equal(out.final_state.cpu(), work.inputs(torch.float32).initial_state)
    assert torch.equal(out.d_initial_state.cpu(), work.cotangents(torch.float32).d_final_state)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not getattr(out, name).any(), name


def test_empty_documents_without_initial_state_end_in_zeros():
    work = Workload(lengths=(0, 3), initial=False)
    out = evaluate(work.inputs(), work.cotangents())
    assert not out.final_state[0].any()
    assert out.final_state[1].any()


def test_no_tokens_at_all_give_empty_outputs_and_the_initial_states():
    work = Workload(lengths=(), tail=0)
    inputs = work.inputs(torch.float32).with_(cu_seqlens=None)
    state = torch.randn(1, work.HV, work.K, work.V)
    d_state = torch.randn_like(state)
    cotangents = Cotangents(work.cotangents(torch.float32).do, d_state)
    out = evaluate(inputs.with_(initial_state=state), cotangents)
    assert out.o.shape == (1, 0, work.HV, work.V)
    assert torch.equal(out.final_state, state)
    assert torch.equal(out.d_initial_state, d_state)


def test_no_documents_at_all_give_zeros():
    work = Workload(lengths=(), tail=3)
    out = evaluate(work.inputs(torch.float32), work.cotangents(torch.float32))
    assert out.final_state.shape[0] == 0
    assert out.o.shape[1] == 3
    assert not out.o.any()
    assert not out.dk.any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rows_after_the_last_document_give_zeros_whatever_they_hold(run, machine, value):
    work = replace(NAMED["mild"], tail=70)
    inputs = work.inputs(torch.float32, machine[1])
    clean = run(work, torch.float32)
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        x[:, work.offsets[-1] :] = value
    cotangents = work.cotangents(torch.float32, machine[1])
    cotangents.do[:, work.offsets[-1] :] = value
    out = evaluate(inputs, cotangents, backend=machine[0])
    assert_bitwise(out, clean)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not getattr(out, name)[:, work.offsets[-1] :].any(), name


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rows_after_the_last_document_give_zeros_through_every_activation(value):
    work = replace(NAMED["mild"], tail=9)
    inputs = work.inputs(torch.float32)
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        x[:, work.offsets[-1] :] = value
    A_log = torch.zeros(work.HV, requires_grad=True)
    dt_bias = torch.zeros(work.HV, requires_grad=True)
    leaves = [getattr(inputs, name).requires_grad_() for name in LEAVES]
    o, _ = chunk_gated_delta_rule(
        *leaves[:5],
        initial_state=leaves[5],
        cu_seqlens=inputs.cu_seqlens,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    do = work.cotangents(torch.float32).do
    found = torch.autograd.grad(o, [*leaves, A_log, dt_bias], do)
    assert not o[:, work.offsets[-1] :].any()
    for name, x in zip((*LEAVES, "A_log", "dt_bias"), found, strict=True):
        assert x.isfinite().all(), name
    for name, x in zip(LEAVES[:5], found, strict=False):
        assert not x[:, work.offsets[-1] :].any(), name


def test_documents_do_not_leak_into_each_other():
    # Slow decay: a state that crossed a boundary would show.
    work = Workload(lengths=(37, 51, 40), gates=-0.05, tail=0)
    inputs, cotangents = work.inputs(), work.cotangents()
    packed = evaluate(inputs, cotangents)
    for n, (start, stop) in enumerate(zip(work.offsets, work.offsets[1:], strict=False)):
        rows = slice(start, stop)
        alone = inputs.with_(
            **{name: getattr(inputs, name)[:, rows] for name in LEAVES[:5]},
            initial_state=inputs.initial_state[n : n + 1],
            cu_seqlens=None,
        )
        d_state = cotangents.d_final_state[n : n + 1]
        one = evaluate(alone, Cotangents(cotangents.do[:, rows], d_state))
        for name, x in one._asdict().items():
            whole = getattr(packed, name)
            part = whole[n : n + 1] if "state" in name else whole[:, rows]
            assert_within(name, part, x, FLOAT64)


def test_changing_one_document_changes_no_bit_of_another():
    work = NAMED["split_documents"]
    inputs, cotangents = work.inputs(torch.float32), work.cotangents(torch.float32)
    before = evaluate(inputs, cotangents)
    first = slice(0, work.offsets[1])
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        x[:, first] = x[:, first].flip(1)
    after = evaluate(inputs, cotangents)
    rest = slice(work.offsets[1], None)
    assert not torch.equal(before.o[:, first], after.o[:, first])
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(getattr(before, name)[:, rest], getattr(after, name)[:, rest]), name
    assert torch.equal(before.final_state[1:], after.final_state[1:])
    assert torch.equal(before.d_initial_state[1:], after.d_initial_state[1:])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_what_is_not_finite_in_one_document_stays_in_it(machine, name):
    # The batch's first row above all: places of a ragged chunk without a token point at it.
    backend, device = machine
    work = Workload(lengths=(3, 70, 1), tail=2)
    inputs = work.inputs(torch.float32, device)
    cotangents = work.cotangents(torch.float32, device)
    before = evaluate(inputs, cotangents, backend=backend)
    getattr(inputs, name)[:, 0] = float("nan")
    after = evaluate(inputs, cotangents, backend=backend)
    assert after.o[:, :3].isnan().any()
    for field in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        x, y = getattr(after, field)[:, 3:], getattr(before, field)[:, 3:]
        assert torch.equal(x, y), field
    assert torch.equal(after.final_state[1:], before.final_state[1:])
    assert torch.equal(after.d_initial_state[1:], before.d_initial_state[1:])


def test_a_reset_at_the_first_token_of_the_batch_matches_the_recurrence(machine):
    backend, device = machine
    work = Workload(lengths=(5, 70), tail=2)
    inputs, cotangents = work.inputs(), work.cotangents()
    g = inputs.g.clone()
    g[:, 0] = float("-inf")
    inputs = inputs.with_(g=g)
    ref = reference_results(inputs, cotangents, scale=work.scale, offsets=work.offsets)
    moved = Cotangents(*(x.to(device) for x in cotangents))
    assert_results(evaluate(inputs.to(device), moved, backend=backend), ref, EAGER)


def test_a_batch_of_rows_equals_the_same_rows_packed_bitwise(machine):
    backend, device = machine
    work = Workload(lengths=(100, 100, 100), tail=0)
    inputs = work.inputs(torch.float32, device)
    cotangents = work.cotangents(torch.float32, device)
    packed = evaluate(inputs, cotangents, backend=backend)

    def rows(x):
        return x.reshape(3, 100, *x.shape[2:])

    batch = inputs.with_(
        **{name: rows(getattr(inputs, name)) for name in LEAVES[:5]}, cu_seqlens=None
    )
    out = evaluate(batch, cotangents._replace(do=rows(cotangents.do)), backend=backend)
    flat = [
        x if name.endswith("state") else x.flatten(0, 1)[None] for name, x in out._asdict().items()
    ]
    assert_bitwise(type(out)(*flat), packed)


def test_a_missing_initial_state_is_zeros_bitwise(machine):
    backend, device = machine
    work = NAMED["split_documents"]
    inputs = work.inputs(torch.float32, device)
    cotangents = work.cotangents(torch.float32, device)
    missing = evaluate(inputs.with_(initial_state=None), cotangents, backend=backend)
    zeros = evaluate(
        inputs.with_(initial_state=torch.zeros_like(inputs.initial_state)),
        cotangents,
        backend=backend,
    )
    assert missing.d_initial_state is None
    assert_bitwise(missing, zeros)


def test_state_v_first_transposes_states_and_their_gradients_and_nothing_else():
    work = NAMED["split_groups"]
    inputs, cotangents = work.inputs(torch.float32), work.cotangents(torch.float32)
    plain = evaluate(inputs, cotangents)
    turned = evaluate(
        inputs.with_(initial_state=inputs.initial_state.mT.contiguous()),
        cotangents._replace(d_final_state=cotangents.d_final_state.mT.contiguous()),
        state_v_first=True,
    )
    assert turned.final_state.shape == (3, work.HV, work.V, work.K)
    back = turned._replace(
        final_state=turned.final_state.mT, d_initial_state=turned.d_initial_state.mT
    )
    assert_bitwise(back, plain)
