"""Raw inputs: norm of q and k, gate, beta, against autograd through the float64 reference."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longdelta import chunk_gated_delta_rule, reference
from longdelta.testing.budgets import EAGER, FLOAT64, assert_within
from longdelta.testing.workloads import NAMED

WORK = NAMED["mild"]


class Raw(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    A_log: Tensor
    dt_bias: Tensor


def raw_inputs(dtype: torch.dtype = torch.float64) -> Raw:
    """Inputs before any activation, with norms far from one."""
    inputs = WORK.inputs(dtype)
    scales = 3 * torch.rand(1, WORK.rows, WORK.H, 1, dtype=torch.float64)
    a = torch.randn(1, WORK.rows, WORK.HV, dtype=torch.float64)
    b = torch.randn(1, WORK.rows, WORK.HV, dtype=torch.float64)
    wide = inputs.g.dtype
    return Raw(
        (scales * inputs.q).to(dtype),
        (scales * inputs.k).to(dtype),
        inputs.v,
        a.to(wide),
        b.to(wide),
        inputs.initial_state,
        torch.linspace(-3, 1, WORK.HV).to(wide),
        torch.linspace(-1, 1, WORK.HV).to(wide),
    )


OPTIONS = {
    "l2norm": {"use_qk_l2norm_in_kernel": True},
    "gate": {"use_gate_in_kernel": True},
    "gate_without_bias": {"use_gate_in_kernel": True, "dt_bias": None},
    "beta_sigmoid": {"use_beta_sigmoid_in_kernel": True},
    "neg_eigval": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "all": {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    },
}


def prepared(raw: Raw, options: dict) -> Raw:
    """What does not come raw under these options, made ready."""
    if not options.get("use_qk_l2norm_in_kernel"):
        raw = raw._replace(
            q=reference.l2norm(raw.q).to(raw.q.dtype), k=reference.l2norm(raw.k).to(raw.k.dtype)
        )
    if not options.get("use_gate_in_kernel"):
        raw = raw._replace(g=-raw.g.abs() / 8)
    if not options.get("use_beta_sigmoid_in_kernel"):
        raw = raw._replace(beta=raw.beta.sigmoid())
    return raw


def through_reference(leaves: Raw, options: dict) -> tuple[Tensor, Tensor]:
    x = Raw(*(y.double() for y in leaves))
    q, k, g, beta = x.q, x.k, x.g, x.beta
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = reference.l2norm(q), reference.l2norm(k)
    if options.get("use_gate_in_kernel"):
        bias = torch.zeros_like(x.dt_bias) if "dt_bias" in options else x.dt_bias
        g = reference.gate(g, x.A_log, bias)
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(beta) * (2 if options.get("allow_neg_eigval") else 1)
    packed = (y[0] for y in (q, k, x.v, g, beta))
    o, state = reference.recurrence(
        *packed, scale=WORK.scale, initial_state=x.initial_state, cu_seqlens=WORK.offsets
    )
    return o[None], state


def through_op(leaves: Raw, options: dict, cu_seqlens=None) -> tuple[Tensor, Tensor]:
    given = dict(options)
    if options.get("use_gate_in_kernel"):
        given = {"A_log": leaves.A_log, "dt_bias": leaves.dt_bias} | given
    return chunk_gated_delta_rule(
        *leaves[:5],
        initial_state=leaves.initial_state,
        output_final_state=True,
        cu_seqlens=torch.tensor(WORK.offsets) if cu_seqlens is None else cu_seqlens,
        **given,
    )


def differentiated(forward, raw: Raw, options: dict, dtype: torch.dtype):
    """Outputs and the gradients of every leaf; zeros for leaves that play no part."""
    leaves = Raw(*(x.detach().clone().requires_grad_() for x in raw))
    outputs = forward(leaves, options)
    cotangents = WORK.cotangents(dtype)
    cotangents = [dx.to(x.dtype) for x, dx in zip(outputs, cotangents, strict=True)]
    found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    zeros = (torch.zeros_like(x) for x in leaves)
    return outputs, [z if x is None else x for x, z in zip(found, zeros, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_raw_inputs_match_autograd_through_the_reference(name, dtype):
    options = OPTIONS[name]
    raw = prepared(raw_inputs(dtype), options)
    outputs, found = differentiated(through_op, raw, options, dtype)
    ref_outputs, ref = differentiated(through_reference, raw, options, dtype)
    for label, x, y in zip(("o", "final_state"), outputs, ref_outputs, strict=True):
        assert_within(label, x, y, EAGER[x.dtype])
    for label, leaf, x, y in zip(Raw._fields, raw, found, ref, strict=True):
        assert x.dtype == leaf.dtype, label
        assert_within(f"d{label}", x, y, EAGER[x.dtype])


def test_rows_of_zeros_under_the_norm_stay_zero_with_finite_gradients():
    options = OPTIONS["l2norm"]
    raw = prepared(raw_inputs(), options)
    raw.k[:, 3] = 0
    raw.q[:, 5] = 0
    outputs, found = differentiated(through_op, raw, options, torch.float64)
    _, ref = differentiated(through_reference, raw, options, torch.float64)
    assert not outputs[0][:, 5].any()
    for label, x, y in zip(Raw._fields, found, ref, strict=True):
        assert_within(f"d{label}", x, y, FLOAT64)


def test_a_head_that_never_decays_has_finite_gradients():
    # A_log = -inf: the gate is -0.0 whatever a is.
    options = OPTIONS["gate"]
    raw = raw_inputs(torch.float32)
    raw = prepared(raw, options)
    raw.A_log[1] = float("-inf")
    outputs, found = differentiated(through_op, raw, options, torch.float32)
    _, ref = differentiated(through_reference, raw, options, torch.float32)
    assert outputs[0].isfinite().all()
    dA_log, da = found[Raw._fields.index("A_log")], found[Raw._fields.index("g")]
    assert dA_log[1] == 0
    assert not da[..., 1].any()
    for label, x, y in zip(Raw._fields, found, ref, strict=True):
        assert_within(f"d{label}", x, y.nan_to_num(), EAGER[x.dtype])


@pytest.mark.parametrize("a", [30.0, -30.0])
def test_saturated_gates_match_the_reference(a):
    options = OPTIONS["gate"]
    raw = prepared(raw_inputs(), options)
    raw.g[:, ::2] = a
    raw.A_log.fill_(-4.0)
    _, found = differentiated(through_op, raw, options, torch.float64)
    _, ref = differentiated(through_reference, raw, options, torch.float64)
    for label, x, y in zip(Raw._fields, found, ref, strict=True):
        assert_within(f"d{label}", x, y, FLOAT64)


@pytest.mark.parametrize("b", [100.0, -100.0])
def test_saturated_betas_are_zero_or_two_with_finite_gradients(b):
    options = OPTIONS["neg_eigval"]
    raw = prepared(raw_inputs(torch.float32), options)
    raw.beta[:, ::3] = b
    _, found = differentiated(through_op, raw, options, torch.float32)
    _, ref = differentiated(through_reference, raw, options, torch.float32)
    for label, x, y in zip(Raw._fields, found, ref, strict=True):
        assert_within(f"d{label}", x, y, EAGER[x.dtype])


def test_strided_raw_inputs_give_the_bits_of_contiguous_ones():
    options = OPTIONS["all"]
    raw = raw_inputs(torch.float32)
    strided = Raw(*(torch.stack([x, x + 1], dim=-1)[..., 0] for x in raw))
    assert not strided.q.is_contiguous()
    outputs, found = differentiated(through_op, raw, options, torch.float32)
    leaves = Raw(*(x.detach().requires_grad_() for x in strided))
    again = through_op(leaves, options)
    gradients = torch.autograd.grad(again, leaves, WORK.cotangents(torch.float32))
    for x, y in zip((*outputs, *found), (*again, *gradients), strict=True):
        assert torch.equal(x, y)
