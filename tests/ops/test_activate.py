"""Raw inputs: norm of q and k, gate, beta, against autograd through the float64 reference.

The op is left to choose its backend, which is the machine's where that takes the problem.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longdelta import chunk_gated_delta_rule, reference
from longdelta.testing.budgets import Budgets, assert_within, budget
from longdelta.testing.workloads import MACHINES, NAMED, Machine, Workload

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

    @property
    def work(self) -> Workload:
        """WORK in these dims."""
        return replace(WORK, K=self.k.shape[-1], V=self.v.shape[-1])


GRADIENTS = tuple("d_initial_state" if x == "initial_state" else f"d{x}" for x in Raw._fields)


def raw_inputs(dtype: torch.dtype = torch.float64, machine: Machine = MACHINES[0]) -> Raw:
    """Inputs before any activation, with norms far from one."""
    dtype = machine.dtype(dtype)
    inputs = machine.fit(WORK).inputs(dtype)
    scales = 3 * torch.rand(1, WORK.rows, WORK.H, 1, dtype=torch.float64)
    a = torch.randn(1, WORK.rows, WORK.HV, dtype=torch.float64)
    b = torch.randn(1, WORK.rows, WORK.HV, dtype=torch.float64)
    wide = inputs.g.dtype
    raw = Raw(
        (scales * inputs.q).to(dtype),
        (scales * inputs.k).to(dtype),
        inputs.v,
        a.to(wide),
        b.to(wide),
        inputs.initial_state,
        torch.linspace(-3, 1, WORK.HV).to(wide),
        torch.linspace(-1, 1, WORK.HV).to(wide),
    )
    return Raw(*(x.to(machine.device) for x in raw))


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
    x = Raw(*(y.double().cpu() for y in leaves))
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
        *packed, scale=x.work.scale, initial_state=x.initial_state, cu_seqlens=WORK.offsets
    )
    return o[None], state


def through_op(leaves: Raw, options: dict, offsets=WORK.offsets) -> tuple[Tensor, Tensor]:
    given = dict(options)
    if options.get("use_gate_in_kernel"):
        given = {"A_log": leaves.A_log, "dt_bias": leaves.dt_bias} | given
    return chunk_gated_delta_rule(
        *leaves[:5],
        initial_state=leaves.initial_state,
        output_final_state=True,
        cu_seqlens=None if offsets is None else torch.tensor(offsets),
        **given,
    )


def differentiated(forward, raw: Raw, options: dict):
    """Outputs and the gradients of every leaf; zeros for leaves that play no part."""
    leaves = Raw(*(x.detach().clone().requires_grad_() for x in raw))
    outputs = forward(leaves, options)
    cotangents = raw.work.cotangents(raw.q.dtype)
    cotangents = [dx.to(x) for x, dx in zip(outputs, cotangents, strict=True)]
    found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    zeros = (torch.zeros_like(x) for x in leaves)
    return outputs, [z if x is None else x for x, z in zip(found, zeros, strict=True)]


def budgets(machine: Machine, options: dict) -> Budgets:
    betas = "up_to_two" if options.get("allow_neg_eigval") else WORK.betas
    return machine.budgets(replace(WORK, betas=betas))


def check_gradients(machine: Machine, options: dict, raw: Raw, found, ref) -> None:
    for name, leaf, x, y in zip(GRADIENTS, raw, found, ref, strict=True):
        assert x.dtype == leaf.dtype, name
        assert_within(name, x, y, budget(budgets(machine, options), name, x.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_raw_inputs_match_autograd_through_the_reference(machine, name, dtype):
    options = OPTIONS[name]
    raw = prepared(raw_inputs(dtype, machine), options)
    outputs, found = differentiated(through_op, raw, options)
    ref_outputs, ref = differentiated(through_reference, raw, options)
    for label, x, y in zip(("o", "final_state"), outputs, ref_outputs, strict=True):
        assert_within(label, x, y, budget(budgets(machine, options), label, x.dtype))
    check_gradients(machine, options, raw, found, ref)


def test_rows_of_zeros_under_the_norm_stay_zero_with_finite_gradients(machine):
    options = OPTIONS["l2norm"]
    raw = prepared(raw_inputs(machine=machine), options)
    raw.k[:, 3] = 0
    raw.q[:, 5] = 0
    outputs, found = differentiated(through_op, raw, options)
    _, ref = differentiated(through_reference, raw, options)
    assert not outputs[0][:, 5].any()
    check_gradients(machine, options, raw, found, ref)


def test_a_head_that_never_decays_has_finite_gradients(machine):
    # A_log = -inf: the gate is -0.0 whatever a is.
    options = OPTIONS["gate"]
    raw = prepared(raw_inputs(torch.float32, machine), options)
    raw.A_log[1] = float("-inf")
    outputs, found = differentiated(through_op, raw, options)
    _, ref = differentiated(through_reference, raw, options)
    assert outputs[0].isfinite().all()
    dA_log, da = found[Raw._fields.index("A_log")], found[Raw._fields.index("g")]
    assert dA_log[1] == 0
    assert not da[..., 1].any()
    check_gradients(machine, options, raw, found, [y.nan_to_num() for y in ref])


@pytest.mark.parametrize("a", [30.0, -30.0])
def test_saturated_gates_match_the_reference(machine, a):
    options = OPTIONS["gate"]
    raw = prepared(raw_inputs(machine=machine), options)
    raw.g[:, ::2] = a
    raw.A_log.fill_(-4.0)
    _, found = differentiated(through_op, raw, options)
    _, ref = differentiated(through_reference, raw, options)
    check_gradients(machine, options, raw, found, ref)


@pytest.mark.parametrize("b", [100.0, -100.0])
def test_saturated_betas_are_zero_or_two_with_finite_gradients(machine, b):
    options = OPTIONS["neg_eigval"]
    raw = prepared(raw_inputs(torch.float32, machine), options)
    raw.beta[:, ::3] = b
    _, found = differentiated(through_op, raw, options)
    _, ref = differentiated(through_reference, raw, options)
    check_gradients(machine, options, raw, found, ref)


@pytest.mark.parametrize("name", ["gate", "beta_sigmoid", "all"])
def test_a_batch_of_ragged_rows_gives_the_bits_of_the_same_rows_packed(machine, name):
    options = OPTIONS[name]
    raw = prepared(raw_inputs(torch.float32, machine), options)
    raw = Raw(*(x[:, :130] for x in raw[:5]), raw.initial_state[:2], *raw[6:])
    batch = Raw(*(x.reshape(2, 65, *x.shape[2:]) for x in raw[:5]), *raw[5:])
    packed = through_op(raw, options, (0, 65, 130))
    rows = through_op(batch, options, None)
    assert torch.equal(rows[0].flatten(0, 1), packed[0][0])
    assert torch.equal(rows[1], packed[1])


def test_strided_raw_inputs_give_the_bits_of_contiguous_ones(machine):
    options = OPTIONS["all"]
    raw = raw_inputs(torch.float32, machine)
    strided = Raw(*(torch.stack([x, x + 1], dim=-1)[..., 0] for x in raw))
    assert not strided.q.is_contiguous()
    outputs, found = differentiated(through_op, raw, options)
    leaves = Raw(*(x.detach().requires_grad_() for x in strided))
    again = through_op(leaves, options)
    cotangents = raw.work.cotangents(raw.q.dtype, machine.device)
    gradients = torch.autograd.grad(again, leaves, cotangents)
    for x, y in zip((*outputs, *found), (*again, *gradients), strict=True):
        assert torch.equal(x, y)
