"""The definition: by hand, against finite differences, and its adjoint against autograd."""

import math
from itertools import pairwise

import pytest
import torch

from longdelta.reference import Gradients, recurrence, recurrence_gradients
from longdelta.testing.budgets import FLOAT64, assert_within

GATES = ["mild", "model", "reset", 0.0, -6.0, -20.0, -120.0]


def test_recurrence_decays_the_state_before_the_correction_on_two_tokens():
    def per_token(*values):
        return torch.tensor(values, dtype=torch.float64).reshape(2, 1, -1)

    out = recurrence(
        per_token(1.0, 2.0),
        per_token(1.0, 0.5),
        per_token(2.0, 3.0),
        per_token(0.0, -1.0)[..., 0],
        per_token(1.0, 0.5)[..., 0],
        scale=0.5,
    )
    # S_1 = 2;  u_2 = 0.5 (3 - 0.5 (2/e));  S_2 = 2/e + 0.5 u_2
    S_2 = 2 / math.e + 0.5 * (0.5 * (3 - 0.5 * (2 / math.e)))
    assert_within("o", out.o.flatten(), torch.tensor([1.0, S_2], dtype=torch.float64), FLOAT64)
    assert_within("final_state", out.final_state.flatten(), out.o[1, 0], FLOAT64)


@pytest.mark.parametrize("betas", ["sigmoid", "zero", "to_two"])
@pytest.mark.parametrize("gates", GATES)
def test_recurrence_gradients_match_autograd(make_batch, gates, betas):
    batch = make_batch([7, 0, 1, 12], gates, betas, tail=2)
    expected = batch.autograd(recurrence)
    actual = recurrence_gradients(*batch.inputs, **batch.backward)
    for name, out, ref in zip(Gradients._fields, actual, expected, strict=True):
        assert out.isfinite().all(), name
        assert_within(name, out, ref, FLOAT64)


def test_recurrence_gradients_match_finite_differences(make_batch):
    batch = make_batch([3, 2], "mild", "to_two", heads=(1, 2), dims=(2, 3))

    def loss(*leaves):
        out = recurrence(*leaves[:5], **{**batch.forward, "initial_state": leaves[5]})
        return (out.o * batch.do).sum() + (out.final_state * batch.d_final_state).sum()

    # Eighth order, so that the step may be large enough to leave the rounding errors small.
    stencil = {1: 4 / 5, 2: -1 / 5, 3: 4 / 105, 4: -1 / 280}
    step = 0.02
    leaves = [*batch.inputs, batch.initial_state]
    actual = recurrence_gradients(*batch.inputs, **batch.backward)
    for i, (name, out) in enumerate(zip(Gradients._fields, actual, strict=True)):
        expected = torch.zeros(out.numel(), dtype=torch.float64)
        for j in range(out.numel()):
            for offset, weight in stencil.items():
                for sign in (1, -1):
                    moved = [x.clone() for x in leaves]
                    moved[i].view(-1)[j] += sign * offset * step
                    expected[j] += sign * weight * loss(*moved) / step
        assert_within(name, out, expected.view_as(out), FLOAT64)


def test_recurrence_forgets_everything_before_a_gate_of_minus_infinity(make_batch):
    batch = make_batch([9])
    batch.g[4] = -torch.inf
    whole = recurrence(*batch.inputs, **batch.forward)
    fresh = recurrence(*(x[4:] for x in batch.inputs), scale=batch.forward["scale"])
    assert torch.equal(whole.final_state, fresh.final_state)
    assert torch.equal(whole.o[4:], fresh.o)
    grads = recurrence_gradients(*batch.inputs, **batch.backward)
    assert all(x.isfinite().all() for x in grads)
    assert not grads.dg[4].any()
    assert grads.dg[5:].all()
    # What came before still reaches its own outputs, and nothing else.
    before = recurrence_gradients(
        *(x[:4] for x in batch.inputs),
        scale=batch.forward["scale"],
        do=batch.do[:4],
        initial_state=batch.initial_state,
    )
    assert torch.equal(grads.d_initial_state, before.d_initial_state)


def test_recurrence_only_decays_the_state_where_beta_is_zero(make_batch):
    batch = make_batch([5], betas="zero")
    out = recurrence(*batch.inputs, **batch.forward)
    decay = batch.g.sum(0).exp()[None, :, None, None]
    assert_within("final_state", out.final_state, decay * batch.initial_state, FLOAT64)


def test_recurrence_reads_the_q_and_k_of_the_group_where_hv_exceeds_h(make_batch):
    batch = make_batch([6], heads=(2, 6))
    shared = recurrence(*batch.inputs, **batch.forward)
    grads = recurrence_gradients(*batch.inputs, **batch.backward)
    head_of = torch.tensor([0, 0, 0, 1, 1, 1])
    wide = batch._replace(q=batch.q[:, head_of], k=batch.k[:, head_of])
    assert torch.equal(shared.o, recurrence(*wide.inputs, **wide.forward).o)
    wide_grads = recurrence_gradients(*wide.inputs, **wide.backward)
    for name in ("dq", "dk"):
        per_head = getattr(wide_grads, name)
        summed = torch.stack([per_head[:, :3].sum(1), per_head[:, 3:].sum(1)], 1)
        assert_within(name, getattr(grads, name), summed, FLOAT64)


def test_recurrence_keeps_packed_documents_apart_bitwise(make_batch):
    batch = make_batch([3, 0, 1, 5], tail=2)
    packed = recurrence(*batch.inputs, **batch.forward)
    packed_grads = recurrence_gradients(*batch.inputs, **batch.backward)
    for n, (begin, end) in enumerate(pairwise(batch.cu_seqlens)):
        rows = slice(begin, end)
        state = batch.initial_state[n : n + 1]
        inputs = [x[rows] for x in batch.inputs]
        scale = batch.forward["scale"]
        alone = recurrence(*inputs, scale=scale, initial_state=state)
        assert torch.equal(packed.o[rows], alone.o)
        assert torch.equal(packed.final_state[n], alone.final_state[0])
        grads = recurrence_gradients(
            *inputs,
            scale=scale,
            do=batch.do[rows],
            d_final_state=batch.d_final_state[n : n + 1],
            initial_state=state,
        )
        assert all(
            torch.equal(a[rows], b) for a, b in zip(packed_grads[:5], grads[:5], strict=True)
        )
        assert torch.equal(packed_grads.d_initial_state[n], grads.d_initial_state[0])


def test_recurrence_gives_zero_for_rows_after_the_last_boundary(make_batch):
    batch = make_batch([3, 2], tail=4)
    out = recurrence(*batch.inputs, **batch.forward)
    grads = recurrence_gradients(*batch.inputs, **batch.backward)
    assert out.o.shape == batch.v.shape
    assert not out.o[5:].any()
    assert not any(x[5:].any() for x in grads[:5])
    assert all(x[4].any() for x in (out.o, *grads[:5]))


def test_recurrence_passes_the_state_through_where_there_are_no_tokens(make_batch):
    batch = make_batch([0, 0])
    out = recurrence(*batch.inputs, **batch.forward)
    grads = recurrence_gradients(*batch.inputs, **batch.backward)
    assert out.o.shape == (0, 4, 12)
    assert torch.equal(out.final_state, batch.initial_state)
    assert torch.equal(grads.d_initial_state, batch.d_final_state)


def test_recurrence_starts_from_zero_where_no_state_is_given(make_batch):
    batch = make_batch([4, 3])
    zeros = torch.zeros_like(batch.initial_state)
    scale, cu_seqlens = batch.forward["scale"], batch.cu_seqlens
    given = recurrence(*batch.inputs, scale=scale, cu_seqlens=cu_seqlens, initial_state=zeros)
    absent = recurrence(*batch.inputs, scale=scale, cu_seqlens=cu_seqlens)
    assert torch.equal(given.o, absent.o)
    assert torch.equal(given.final_state, absent.final_state)
