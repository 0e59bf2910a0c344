"""Outputs and gradients of the op against the token recurrence in float64."""

from dataclasses import replace

import pytest
import torch

from longdelta import chunk_gated_delta_rule
from longdelta.testing.budgets import EAGER, FLOAT64, assert_within, budget
from longdelta.testing.workloads import (
    MACHINES,
    NAMED,
    Cotangents,
    Workload,
    assert_bitwise,
    assert_results,
    evaluate,
    expected,
    reference_results,
)

VANISHING = ("dg", "d_initial_state")
"""Under strong gates these are all but zero: compared to their size in a mild run."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ANY_DIMS = [machine for machine in MACHINES if machine.takes_any_dims]
MILD = [
    "mild",
    "no_decay",
    "beta_zero",
    "beta_one",
    "beta_up_to_two",
    "correlated_keys",
    "nearly_equal_keys",
    "groups_of_one",
    "groups_of_three",
    "one_chunk",
    "ragged_tails",
    "split_documents",
    "split_reflections",
    "split_groups",
    "split_reset",
]
STRONG = ["model", "strong_6", "strong_20", "strong_120", "reset", "split_model"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MILD)
def test_op_matches_the_recurrence_in_every_dtype(machine, name, dtype):
    work = NAMED[name]
    found = machine.run(work, dtype)
    assert_results(found, machine.expected(work, dtype), machine.budgets(work))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STRONG)
def test_op_matches_the_recurrence_under_strong_decay(machine, name, dtype):
    work = NAMED[name]
    mild = machine.expected(replace(work, gates="mild"), dtype)
    out, ref = machine.run(work, dtype), machine.expected(work, dtype)
    assert_results(out, ref, machine.budgets(work), scale=mild, vanishing=VANISHING)


@pytest.mark.parametrize("gate", [-1.0, -5.545, -10.0, -88.0, -1e4])
def test_op_stays_finite_and_exact_for_any_constant_gate(machine, gate):
    # Around the places where rescaled exponents of other schemes overflow.
    work = Workload(gates=gate)
    out, ref, mild = machine.run(work), machine.expected(work), machine.expected(Workload())
    assert_results(out, ref, machine.budgets(work), scale=mild, vanishing=VANISHING)


def test_op_takes_a_gate_of_minus_zero_for_none_bitwise(machine):
    work = Workload(lengths=(7, 50, 64, 129), gates=0.0, tail=0)
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    negative = machine.evaluate(inputs.with_(g=-inputs.g), cotangents)
    assert_bitwise(negative, machine.evaluate(inputs, cotangents))


def test_op_matches_the_recurrence_where_gates_alternate_between_none_and_strong(machine):
    work = machine.fit(Workload(tail=0))
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    inputs.g[:] = 0
    inputs.g[:, 1::2] = -20.0
    ref = reference_results(inputs, cotangents, scale=work.scale, offsets=work.offsets)
    out, mild = machine.evaluate(inputs, cotangents), machine.expected(work)
    assert_results(out, ref, machine.budgets(work), scale=mild, vanishing=VANISHING)


def test_op_decays_before_it_corrects_and_reads_after_it_writes(machine):
    # By hand, in one dimension of K and V, k = q = 1, beta = 1/2, scale = 1, from a state of 8:
    #   P = 8 / 2 = 4, u = (2 - 4) / 2 = -1, S = 3, o = 3; then P = 1.5, u = (6.5 - 1.5) / 2, S = 4
    work = Workload(lengths=(2,), H=1, HV=1, K=1, V=1, tail=0)
    x = machine.inputs(work, torch.float64)
    hand = [torch.zeros_like(y) for y in (x.q, x.v, x.initial_state)]
    key, value, state = hand
    key[..., 0], state[..., 0, 0] = 1, 8
    value[0, 0, 0, 0], value[0, 1, 0, 0] = 2, 6.5
    half = torch.full_like(x.beta, 0.5)
    o, final_state = chunk_gated_delta_rule(
        *(key, key, value, half.log(), half),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        backend=machine.backend,
    )
    hand = torch.tensor([3.0, 4.0], dtype=torch.float64)
    exact = FLOAT64 if machine.takes_any_dims else 1e-6
    assert_within("o", o[0, :, 0, 0], hand, exact)
    assert_within("final_state", final_state[0, 0, 0, :1], hand[1:], exact)
    assert not o[..., 1:].any()


def test_op_keeps_its_digits_through_thousands_of_reflections(machine):
    # beta near 2: the rule hardly contracts, and errors would pile up.
    work = Workload(lengths=(4096,), gates=-1e-3, betas="near_two", H=1, HV=2, K=16, V=8, tail=0)
    assert_results(machine.run(work), machine.expected(work), machine.budgets(work))


def test_op_takes_keys_of_any_length(machine):
    # The rule then grows by up to |k|^2 a token: 4 tokens stay in the range, 1,024 do not.
    few = Workload(lengths=(4,), keys="raw", tail=0)
    o = machine.run(few).o
    assert_within("o", o, machine.expected(few).o, budget(machine.budgets(few), "o", o.dtype))
    many = Workload(lengths=(1024, 70), tail=0)
    inputs, cotangents = machine.inputs(many), machine.cotangents(many)
    clean = machine.evaluate(inputs, cotangents)
    inputs.k[:, :1024] *= 12
    wild = machine.evaluate(inputs, cotangents)
    assert torch.equal(wild.o[:, 1024:], clean.o[:, 1024:])
    assert torch.equal(wild.final_state[1], clean.final_state[1])


def test_op_takes_large_values_in_float16():
    work = Workload(K=32, V=32)
    inputs, cotangents = work.inputs(torch.float16), work.cotangents(torch.float16)
    inputs = inputs.with_(v=100 * inputs.v)
    ref = reference_results(inputs, cotangents, scale=work.scale, offsets=work.offsets)
    assert_results(evaluate(inputs, cotangents), ref, EAGER)


def test_op_starts_a_document_at_a_gate_of_minus_infinity():
    # Everything after the reset equals a run of its own from a zero state.
    work = Workload(lengths=(150,), tail=0, initial=False)
    inputs, cotangents = work.inputs(), work.cotangents()
    inputs.g[:, 100] = float("-inf")
    whole = evaluate(inputs, cotangents)
    cut = inputs.with_(cu_seqlens=torch.tensor([0, 100, 150]))
    d_state = torch.cat([torch.zeros_like(cotangents.d_final_state), cotangents.d_final_state])
    split = evaluate(cut, Cotangents(cotangents.do, d_state))
    split = split._replace(final_state=split.final_state[1:], d_initial_state=None)
    assert whole.dg.isfinite().all()
    assert not whole.dg[:, 100].any()
    # The gate of a document's first token matters only where its gradient can be felt.
    dg = split.dg.clone()
    dg[:, 100] = 0
    assert_results(whole, split._replace(dg=dg), EAGER)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_op_scales_the_query_by_what_it_is_told(scale):
    work = NAMED["mild"]
    inputs, cotangents = work.inputs(), work.cotangents()
    ref = reference_results(inputs, cotangents, scale=scale, offsets=work.offsets)
    assert_results(evaluate(inputs, cotangents, scale=scale), ref, EAGER)


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_op_gives_the_gradients_of_a_single_used_output(used):
    work = NAMED["split_documents"]
    inputs, both = work.inputs(), work.cotangents()
    cotangents = both._replace(**{"d_final_state" if used == "o" else "do": None})
    ref = reference_results(inputs, cotangents, scale=work.scale, offsets=work.offsets)
    out = evaluate(inputs, cotangents, output_final_state=used == "final_state")
    assert_results(out, ref, EAGER)
    if used == "final_state":
        assert not out.dq.any()


def test_op_gives_the_gradients_of_o_where_the_final_state_comes_back_unused():
    work = NAMED["mild"]
    inputs, cotangents = work.inputs(), work.cotangents()._replace(d_final_state=None)
    ref = reference_results(inputs, cotangents, scale=work.scale, offsets=work.offsets)
    assert_results(evaluate(inputs, cotangents), ref, EAGER)


@pytest.mark.parametrize("split", [False, True], ids=["one_segment", "three_segments"])
def test_op_matches_the_recurrence_for_many_heads_where_long_documents_are_split(split):
    # HV >= 32: split above 256 chunks only, into segments of 128.
    tokens = 64 * 257 if split else 64 * 17
    work = Workload(
        lengths=(tokens + 1,), gates="slow", betas="small", H=32, HV=32, K=3, V=2, tail=0
    )
    assert_results(
        evaluate(work.inputs(torch.float32), work.cotangents(torch.float32)),
        expected(work, torch.float32),
        EAGER,
    )


@pytest.mark.parametrize("machine", ANY_DIMS, indirect=True, ids=str)
@pytest.mark.parametrize("dims", [(1, 1), (3, 64), (64, 3), (17, 33)], ids=str)
def test_op_takes_any_key_and_value_dim(machine, dims):
    work = Workload(K=dims[0], V=dims[1], betas="small" if dims[0] == 1 else "sigmoid")
    assert_results(machine.run(work, torch.float64), expected(work), EAGER)


def test_op_gives_each_gradient_in_the_dtype_of_its_input():
    work = NAMED["mild"]
    inputs = work.inputs(torch.bfloat16)
    inputs = inputs.with_(beta=inputs.beta.bfloat16(), initial_state=inputs.initial_state.half())
    out = evaluate(inputs, work.cotangents(torch.bfloat16))
    assert out.dq.dtype == out.dk.dtype == out.dv.dtype == out.dbeta.dtype == torch.bfloat16
    assert out.dg.dtype == out.final_state.dtype == torch.float32
    assert out.d_initial_state.dtype == torch.float16
    ref = reference_results(
        inputs, work.cotangents(torch.bfloat16), scale=work.scale, offsets=work.offsets
    )
    assert_results(out, ref, EAGER)
