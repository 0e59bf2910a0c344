"""The op inside autograd: subsets, strides, second backwards, checkpoints, explicit calls."""

from contextlib import nullcontext
from itertools import chain, combinations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from longdelta import InvalidInput, chunk_gated_delta_rule, gdn_backward, gdn_forward
from longdelta.ops import plans
from longdelta.testing.workloads import (
    LEAVES,
    NAMED,
    Cotangents,
    Results,
    assert_bitwise,
    evaluate,
)

WORK = NAMED["split_groups"]
SUBSETS = list(chain.from_iterable(combinations(LEAVES, n) for n in (1, 2, 5)))


@pytest.mark.parametrize("leaves", SUBSETS, ids="-".join)
def test_gradients_have_the_same_bits_whichever_are_asked_for(leaves):
    work = NAMED["mild"]
    inputs, cotangents = work.inputs(torch.float32), work.cotangents(torch.float32)
    out = evaluate(inputs, cotangents, leaves=leaves)
    whole = evaluate(inputs, cotangents)
    given = [name for name, x in zip(LEAVES, out[2:], strict=True) if x is not None]
    assert set(given) == set(leaves)
    assert_bitwise(out, whole)


def test_inputs_that_need_no_gradient_get_none_and_no_graph_is_built_for_none_of_them():
    x = NAMED["mild"].inputs()
    o, state = chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)
    assert not o.requires_grad
    assert state is None
    v = x.v.clone().requires_grad_()
    o, state = chunk_gated_delta_rule(x.q, x.k, v, x.g, x.beta)
    o.sum().backward()
    assert v.grad.any()
    assert x.q.grad is None


def strided(kind, x):
    """The same values in another layout."""
    if kind == "last_stride_two":
        y = torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]
    elif kind == "heads_outside":
        y = x.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        pad = torch.full_like(x, float("nan"))
        y = torch.cat([pad, x, pad], dim=-1).split(x.shape[-1], dim=-1)[1]
    assert not y.is_contiguous()
    return y


@pytest.mark.parametrize("kind", ["split_view", "heads_outside", "last_stride_two"])
def test_strided_inputs_and_cotangents_give_the_bits_of_contiguous_ones(machine, kind):
    work = NAMED["split_documents"]  # several heads: with one, any order of axes is contiguous
    inputs, cotangents = machine.inputs(work), machine.cotangents(work)
    views = inputs.with_(**{name: strided(kind, getattr(inputs, name)) for name in LEAVES})
    d_views = Cotangents(*(strided(kind, x) for x in cotangents))
    out = machine.evaluate(views, d_views)
    assert_bitwise(out, machine.evaluate(inputs, cotangents))


def test_an_expanded_cotangent_gives_the_bits_of_a_written_one():
    inputs = WORK.inputs(torch.float32)
    ones = torch.ones(1, WORK.rows, WORK.HV, WORK.V)
    expanded = torch.ones(()).expand_as(ones)
    found = [evaluate(inputs, Cotangents(do, None)) for do in (ones, expanded)]
    assert_bitwise(*found)


def test_zero_cotangents_give_the_bits_of_missing_ones():
    inputs, cotangents = WORK.inputs(torch.float32), WORK.cotangents(torch.float32)
    for name in Cotangents._fields:
        zeros = cotangents._replace(**{name: torch.zeros_like(getattr(cotangents, name))})
        missing = cotangents._replace(**{name: None})
        assert_bitwise(evaluate(inputs, zeros), evaluate(inputs, missing))


def test_a_second_backward_through_the_backward_raises():
    x = NAMED["mild"].inputs()
    q = x.q.clone().requires_grad_()
    o, _ = chunk_gated_delta_rule(q, x.k, x.v, x.g, x.beta)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dq.sum().backward()


def test_the_same_graph_run_backward_twice_gives_the_same_bits():
    x = NAMED["mild"].inputs(torch.float32)
    q = x.q.clone().requires_grad_()
    o, _ = chunk_gated_delta_rule(q, x.k, x.v, x.g, x.beta)
    first = torch.autograd.grad(o, q, torch.ones_like(o), retain_graph=True)
    second = torch.autograd.grad(o, q, torch.ones_like(o))
    assert torch.equal(*first, *second)


class Looking(TorchDispatchMode):
    """Calls below it go through the dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("looked_on", [nullcontext, Looking], ids=["", "later looked on"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("save", ["auto", "none", "light", "full"])
def test_checkpointing_gives_the_bits_of_a_plain_call(machine, reentrant, save, looked_on):
    inputs, cotangents = machine.inputs(WORK), machine.cotangents(WORK)
    leaves = [getattr(inputs, name).clone().requires_grad_() for name in LEAVES]

    def call(q, k, v, g, beta, state):
        return chunk_gated_delta_rule(
            *(q, k, v, g, beta),
            initial_state=state,
            output_final_state=True,
            cu_seqlens=inputs.cu_seqlens,
            save=save,
            backend=machine.backend,
        )

    o, state = checkpoint(call, *leaves, use_reentrant=reentrant)
    with looked_on():
        torch.autograd.backward((o, state), cotangents)
    out = Results(o.detach(), state.detach(), *(x.grad for x in leaves))
    assert_bitwise(out, machine.evaluate(inputs, cotangents, save=save))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_around_the_op_changes_no_bit(machine, dtype):
    plain = machine.run(WORK, dtype)
    with torch.autocast(machine.device, dtype=torch.bfloat16):
        assert_bitwise(machine.run(WORK, dtype), plain)


def test_inference_mode_gives_the_bits_of_a_plain_call(machine):
    plain = machine.run(WORK)
    with torch.inference_mode():
        assert_bitwise(machine.run(WORK, leaves=()), plain)


def test_boundaries_changed_between_forward_and_backward_do_not_reach_the_backward():
    x = NAMED["mild"].inputs(torch.float32)
    q = x.q.clone().requires_grad_()
    o, _ = chunk_gated_delta_rule(q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens)
    expected = torch.autograd.grad(o.sum(), q, retain_graph=True)[0]
    x.cu_seqlens[1] += 1
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], expected)


def test_device_boundaries_changed_between_forward_and_backward_raise(monkeypatch):
    monkeypatch.setattr(plans, "READ_EVERY_TIME", frozenset())  # the CPU in a device's place
    x = NAMED["mild"].inputs(torch.float32)
    q = x.q.clone().requires_grad_()
    o, _ = chunk_gated_delta_rule(q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens)
    x.cu_seqlens[1] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def explicit_options(inputs):
    return {
        "initial_state": inputs.initial_state,
        "cu_seqlens": inputs.cu_seqlens,
        "output_final_state": True,
    }


@pytest.mark.parametrize("save", ["none", "light", "full", None])
def test_explicit_forward_and_backward_give_the_bits_of_autograd(machine, save):
    inputs = machine.inputs(WORK, torch.bfloat16)
    cotangents = machine.cotangents(WORK, torch.bfloat16)
    options = explicit_options(inputs) | {"backend": machine.backend}
    packed = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    forward = gdn_forward(*packed, save=save or "none", **options)
    saved = None if save is None else forward.saved
    found = gdn_backward(*cotangents, *packed, saved=saved, **options)
    assert found.dA_log is None
    assert found.ddt_bias is None
    out = Results(forward.o, forward.final_state, *found[:6])
    assert_bitwise(out, machine.evaluate(inputs, cotangents))


def test_explicit_backward_takes_missing_cotangents_and_raw_inputs():
    work = NAMED["mild"]
    x = work.inputs(torch.float32)
    packed = (x.q, x.k, x.v, x.g, x.beta)
    options = {
        "cu_seqlens": x.cu_seqlens,
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(-2, 0, work.HV).requires_grad_(),
        "dt_bias": torch.linspace(0, 1, work.HV).requires_grad_(),
    }
    do = work.cotangents(torch.float32).do
    leaves = (*packed, options["A_log"], options["dt_bias"])
    for leaf in packed:
        leaf.requires_grad_()
    o, _ = chunk_gated_delta_rule(*packed, **options)
    ref = torch.autograd.grad(o, leaves, do)
    found = gdn_backward(do, None, *packed, **options)
    assert found.d_initial_state is None
    for x, y in zip((*found[:5], found.dA_log, found.ddt_bias), ref, strict=True):
        assert torch.equal(x, y)
    nothing = gdn_backward(None, None, *packed, **options)
    assert not any(x.any() for x in nothing if x is not None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scale": 0.5}, r"scale was 0\.\d+, is 0\.5\."),
        ({"initial_state": None}, r"an initial_state was True, is False\."),
        # As many documents, other ones.
        (
            {"cu_seqlens": torch.tensor([0, 1000, 1070, 1770])},
            r"cu_seqlens was \(0, .*, is \(0, 1000",
        ),
        (
            {"state_v_first": True, "initial_state": None},
            "an initial_state was True, is False; state_v_first was False, is True",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_saved_set_of_another_call_is_refused_by_what_differs(change, named):
    inputs, cotangents = WORK.inputs(torch.float32), WORK.cotangents(torch.float32)
    packed = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    options = explicit_options(inputs)
    saved = gdn_forward(*packed, **options).saved
    with pytest.raises(InvalidInput, match=rf"saved must come from gdn_forward.* options; {named}"):
        gdn_backward(cotangents.do, None, *packed, saved=saved, **(options | change))


def test_wrong_cotangents_are_refused_by_name():
    inputs, cotangents = WORK.inputs(torch.float32), WORK.cotangents(torch.float32)
    packed = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    with pytest.raises(InvalidInput, match=r"do must be \[1, .*got \[1, 3\]"):
        gdn_backward(torch.ones(1, 3), None, *packed, **explicit_options(inputs))
    with pytest.raises(InvalidInput, match="d_final_state must be"):
        gdn_backward(None, cotangents.do, *packed, **explicit_options(inputs))
