"""Documents in one batch: boundaries, empty documents, rows after the last one, leaks."""

from dataclasses import replace

import pytest
import torch

from longdelta import chunk_gated_delta_rule
from longdelta.testing.budgets import FLOAT64, assert_within
from longdelta.testing.workloads import (
    LEAVES,
    NAMED,
    Cotangents,
    Workload,
    assert_bitwise,
    assert_results,
    reference_results,
)


@pytest.mark.parametrize(
    "lengths",
    [
        (0, 5, 0, 0, 65, 0),  # repeated boundaries at every place
        (1, 1, 1),  # documents of one token
        (64, 128),  # no ragged chunk
        tuple(range(1, 9)),  # shorter than any tile
        (16,) * 200,
    ],
    ids=lambda lengths: str(lengths)[:20],
)
def test_documents_of_any_length_match_the_recurrence(machine, lengths):
    work = Workload(lengths=lengths, tail=2)
    ref = machine.expected(work, torch.float64)
    assert_results(machine.run(work, torch.float64), ref, machine.budgets(work))


def test_a_batch_of_at_most_eight_tokens_matches_the_recurrence(machine):
    for tokens in range(1, 9):
        work = Workload(lengths=(tokens,), tail=0)
        inputs = machine.inputs(work).with_(cu_seqlens=None)
        out = machine.evaluate(inputs, machine.cotangents(work))
        assert_results(out, machine.expected(work), machine.budgets(work))


@pytest.mark.parametrize("tail", [0, 7])
def test_a_batch_of_empty_documents_passes_states_through_bitwise(machine, tail):
    work = Workload(lengths=(0, 0), tail=tail)
    out = machine.run(work)
    assert torch.equal(out.final_state, machine.inputs(work).initial_state)
    assert torch.equal(out.d_initial_state, machine.cotangents(work).d_final_state)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not getattr(out, name).any(), name


def test_empty_documents_without_initial_state_end_in_zeros(machine):
    work = Workload(lengths=(0, 3), initial=False)
    out = machine.run(work)
    assert not out.final_state[0].any()
    assert out.final_state[1].any()


def test_no_tokens_at_all_give_empty_outputs_and_the_initial_states(machine):
    work = machine.fit(Workload(lengths=(), tail=0))
    inputs = machine.inputs(work).with_(cu_seqlens=None)
    state = torch.randn(1, work.HV, work.K, work.V, device=machine.device)
    d_state = torch.randn_like(state)
    cotangents = Cotangents(machine.cotangents(work).do, d_state)
    out = machine.evaluate(inputs.with_(initial_state=state), cotangents)
    assert out.o.shape == (1, 0, work.HV, work.V)
    assert torch.equal(out.final_state, state)
    assert torch.equal(out.d_initial_state, d_state)


def test_no_documents_at_all_give_zeros(machine):
    out = machine.run(Workload(lengths=(), tail=3))
    assert out.final_state.shape[0] == 0
    assert out.o.shape[1] == 3
    assert not out.o.any()
    assert not out.dk.any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rows_after_the_last_document_give_zeros_whatever_they_hold(machine, value):
    work = replace(NAMED["mild"], tail=70)
    clean, inputs, cotangents = machine.run(work), machine.inputs(work), machine.cotangents(work)
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        x[:, work.offsets[-1] :] = value
    cotangents.do[:, work.offsets[-1] :] = value
    out = machine.evaluate(inputs, cotangents)
    assert_bitwise(out, clean)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not getattr(out, name)[:, work.offsets[-1] :].any(), name


@pytest.mark.parametrize("tokens", [65, 79, 97, 127])
def test_the_tail_of_a_chunk_does_not_depend_on_memory_after_the_batch(machine, tokens):
    work = Workload(lengths=(tokens,), tail=0)
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)

    def amid_infinities(x):
        memory = torch.full((1, 3 * 64 + tokens, *x.shape[2:]), float("inf")).to(x)
        memory[:, 64 : 64 + tokens] = x
        return memory[:, 64 : 64 + tokens]

    views = {name: amid_infinities(getattr(inputs, name)) for name in LEAVES[:5]}
    d_views = cotangents._replace(do=amid_infinities(cotangents.do))
    out = machine.evaluate(inputs.with_(**views), d_views)
    assert_bitwise(out, machine.evaluate(inputs, cotangents))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rows_after_the_last_document_give_zeros_through_every_activation(machine, value):
    work = machine.fit(replace(NAMED["mild"], tail=9))
    inputs = machine.inputs(work)
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        x[:, work.offsets[-1] :] = value
    A_log = torch.zeros(work.HV, device=machine.device, requires_grad=True)
    dt_bias = torch.zeros(work.HV, device=machine.device, requires_grad=True)
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
        backend=machine.backend,
    )
    do = machine.cotangents(work).do
    found = torch.autograd.grad(o, [*leaves, A_log, dt_bias], do)
    assert not o[:, work.offsets[-1] :].any()
    for name, x in zip((*LEAVES, "A_log", "dt_bias"), found, strict=True):
        assert x.isfinite().all(), name
    for name, x in zip(LEAVES[:5], found, strict=False):
        assert not x[:, work.offsets[-1] :].any(), name


def test_documents_do_not_leak_into_each_other(machine):
    # Slow decay: a state that crossed a boundary would show.
    work = Workload(lengths=(37, 51, 40), gates=-0.05, tail=0)
    inputs, cotangents = (
        machine.inputs(work, torch.float64),
        machine.cotangents(work, torch.float64),
    )
    packed = machine.evaluate(inputs, cotangents)
    for n, (start, stop) in enumerate(zip(work.offsets, work.offsets[1:], strict=False)):
        rows = slice(start, stop)
        alone = inputs.with_(
            **{name: getattr(inputs, name)[:, rows] for name in LEAVES[:5]},
            initial_state=inputs.initial_state[n : n + 1],
            cu_seqlens=None,
        )
        d_state = cotangents.d_final_state[n : n + 1]
        one = machine.evaluate(alone, Cotangents(cotangents.do[:, rows], d_state))
        for name, x in one._asdict().items():
            whole = getattr(packed, name)
            part = whole[n : n + 1] if "state" in name else whole[:, rows]
            exact = machine.takes_any_dims or name in ("o", "final_state")
            assert_within(name, part, x, FLOAT64 if exact else machine.budgets(work)[name])


def test_changing_one_document_changes_no_bit_of_another(machine):
    work = NAMED["split_documents"]
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    before = machine.evaluate(inputs, cotangents)
    first = slice(0, work.offsets[1])
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        x[:, first] = x[:, first].flip(1)
    after = machine.evaluate(inputs, cotangents)
    rest = slice(work.offsets[1], None)
    assert not torch.equal(before.o[:, first], after.o[:, first])
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(getattr(before, name)[:, rest], getattr(after, name)[:, rest]), name
    assert torch.equal(before.final_state[1:], after.final_state[1:])
    assert torch.equal(before.d_initial_state[1:], after.d_initial_state[1:])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_what_is_not_finite_in_one_document_stays_in_it(machine, name):
    # The batch's first row above all: places of a ragged chunk without a token point at it.
    work = Workload(lengths=(3, 70, 1), tail=2)
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    before = machine.evaluate(inputs, cotangents)
    getattr(inputs, name)[:, 0] = float("nan")
    after = machine.evaluate(inputs, cotangents)
    assert after.o[:, :3].isnan().any()
    for field in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        x, y = getattr(after, field)[:, 3:], getattr(before, field)[:, 3:]
        assert torch.equal(x, y), field
    assert torch.equal(after.final_state[1:], before.final_state[1:])
    assert torch.equal(after.d_initial_state[1:], before.d_initial_state[1:])


def test_a_reset_at_the_first_token_of_the_batch_matches_the_recurrence(machine):
    work = machine.fit(Workload(lengths=(5, 70), tail=2))
    inputs, cotangents = (
        machine.inputs(work, torch.float64),
        machine.cotangents(work, torch.float64),
    )
    inputs.g[:, 0] = float("-inf")
    ref = reference_results(inputs, cotangents, scale=work.scale, offsets=work.offsets)
    assert_results(machine.evaluate(inputs, cotangents), ref, machine.budgets(work))


def test_a_batch_of_rows_equals_the_same_rows_packed_bitwise(machine):
    work = Workload(lengths=(100, 100, 100), tail=0)
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    packed = machine.evaluate(inputs, cotangents)

    def rows(x):
        return x.reshape(3, 100, *x.shape[2:])

    batch = inputs.with_(
        **{name: rows(getattr(inputs, name)) for name in LEAVES[:5]}, cu_seqlens=None
    )
    out = machine.evaluate(batch, cotangents._replace(do=rows(cotangents.do)))
    flat = [
        x if name.endswith("state") else x.flatten(0, 1)[None] for name, x in out._asdict().items()
    ]
    assert_bitwise(type(out)(*flat), packed)


def test_a_missing_initial_state_is_zeros_bitwise(machine):
    work = NAMED["split_documents"]
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    missing = machine.evaluate(inputs.with_(initial_state=None), cotangents)
    state = torch.zeros_like(inputs.initial_state)
    zeros = machine.evaluate(inputs.with_(initial_state=state), cotangents)
    assert missing.d_initial_state is None
    assert missing.final_state.shape == state.shape
    assert_bitwise(missing, zeros)


def test_state_v_first_transposes_states_and_their_gradients_and_nothing_else(machine):
    work = machine.fit(NAMED["split_groups"])
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    plain = machine.evaluate(inputs, cotangents)
    turned = machine.evaluate(
        inputs.with_(initial_state=inputs.initial_state.mT.contiguous()),
        cotangents._replace(d_final_state=cotangents.d_final_state.mT.contiguous()),
        state_v_first=True,
    )
    assert turned.final_state.shape == (3, work.HV, work.V, work.K)
    back = turned._replace(
        final_state=turned.final_state.mT, d_initial_state=turned.d_initial_state.mT
    )
    assert_bitwise(back, plain)
