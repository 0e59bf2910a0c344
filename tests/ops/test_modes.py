"""The op in torch's other modes: forward-mode AD, inference, default devices, fake tensors."""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from longdelta import InvalidInput, chunk_gated_delta_rule, gdn_backward, gdn_forward
from longdelta.distributed import RecomputeHandle, build_cp_context
from longdelta.nn import GatedDeltaNet, causal_conv1d
from longdelta.ops import plans
from longdelta.testing.workloads import NAMED

WORK = NAMED["mild"]


def operands():
    x = WORK.inputs(torch.float32)
    return [x.q, x.k, x.v, x.g, x.beta]


def test_forward_mode_is_refused_instead_of_dropping_the_tangent():
    given = operands()
    with pytest.raises(InvalidInput, match="forward-mode"):
        torch.func.jvp(
            lambda q: chunk_gated_delta_rule(q, *given[1:])[0],
            (given[0],),
            (torch.ones_like(given[0]),),
        )
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(given[2], torch.ones_like(given[2]))
        with pytest.raises(InvalidInput, match="forward-mode"):
            gdn_forward(*given[:2], dual, *given[3:])
        with pytest.raises(InvalidInput, match="forward-mode"):
            gdn_backward(dual, None, *given)


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, gdn_forward])
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev"])
def test_functional_gradients_are_refused_with_a_way_out(op, transform):
    q, *rest = operands()

    def loss(q):
        return op(q, *rest)[0].sum()

    outer = getattr(torch.func, transform)
    with pytest.raises(InvalidInput, match=r"torch\.func\.grad.*use backward or torch\.autograd"):
        outer(loss, q) if transform == "vjp" else outer(loss)(q)


def test_forward_mode_over_reverse_is_refused_instead_of_dropping_the_tangent():
    q, *rest = operands()
    q = q.clone().requires_grad_()
    with forward_ad.dual_level():
        o, _ = chunk_gated_delta_rule(q, *rest)
        weight = forward_ad.make_dual(torch.ones_like(o), torch.ones_like(o))
        with pytest.raises(InvalidInput, match="forward-mode"):
            torch.autograd.grad((o * weight).sum(), q)


@pytest.mark.parametrize("save", ["none", "light", "full"])
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_cpu"])
def test_a_buffer_of_boundaries_may_be_filled_anew_before_the_backward(name, save):
    leaves = [x.clone().requires_grad_() for x in operands()]
    buffer = np.array([0, 50, leaves[0].shape[1]])
    o, _ = chunk_gated_delta_rule(*leaves, **{name: torch.from_numpy(buffer)}, save=save)
    expected = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    buffer[1] = 60
    for came, wanted in zip(torch.autograd.grad(o.sum(), leaves), expected, strict=True):
        assert torch.equal(came, wanted)


@pytest.mark.parametrize("first_use_in_inference_mode", [False, True])
def test_boundaries_and_contexts_of_inference_mode_serve_a_training_step(
    first_use_in_inference_mode,
):
    q, k, v, g, beta = operands()
    rows = q.shape[1]
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 50, rows])
        context = build_cp_context([0, 50, rows])
        if first_use_in_inference_mode:
            chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)
    leaf = q.clone().requires_grad_()
    o, _ = chunk_gated_delta_rule(leaf, k, v, g, beta, cu_seqlens=cu_seqlens)
    plain = torch.autograd.grad(o.sum(), leaf)[0]
    o, _ = chunk_gated_delta_rule(leaf, k, v, g, beta, cp_context=context)
    assert torch.equal(torch.autograd.grad(o.sum(), leaf)[0], plain)
    layer = GatedDeltaNet(8, 1, 2, 4)
    layer(torch.randn(1, rows, 8), cp_context=context).y.sum().backward()
    assert layer.A_log.grad is not None


def test_a_default_device_changes_nothing():
    q, k, v, g, beta = operands()
    bounds = [0, 50, q.shape[1]]
    given = torch.tensor(bounds)
    ref = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=given)[0]
    plans._tables.cache_clear()
    with torch.device("meta"):
        context = build_cp_context(bounds)
        out = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=given)[0]
        across = chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)[0]
    assert torch.equal(out, ref)
    assert torch.equal(across, ref)


def test_contexts_and_handles_are_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        context, handle = build_cp_context([0, 7]), RecomputeHandle()
        gone = [weakref.ref(context), weakref.ref(handle._record), weakref.ref(context._parts)]
        del context, handle
        assert [each() for each in gone] == [None, None, None]
    finally:
        gc.enable()


def test_one_recompute_handle_for_two_calls_is_refused():
    q, k, v, g, beta = operands()
    handle = RecomputeHandle()
    chunk_gated_delta_rule(q, k, v, g, beta, recompute=handle)
    with pytest.raises(RuntimeError, match="one RecomputeHandle serves one call"):
        chunk_gated_delta_rule(q, k.flip(1), v, g, beta, recompute=handle)


def test_one_recompute_handle_for_other_boundaries_is_refused():
    given, handle = operands(), RecomputeHandle()
    rows = given[0].shape[1]
    chunk_gated_delta_rule(*given, recompute=handle, cu_seqlens=torch.tensor([0, 50, rows]))
    with pytest.raises(RuntimeError, match="this call's plan"):
        chunk_gated_delta_rule(*given, recompute=handle, cu_seqlens=torch.tensor([0, 60, rows]))


def test_a_refused_call_does_not_use_up_a_recompute_handle():
    q, k, v, g, beta = operands()
    handle = RecomputeHandle()
    for _ in range(3):
        with pytest.raises(InvalidInput):
            chunk_gated_delta_rule(q, k, v, None, beta, recompute=handle)
    first, _ = chunk_gated_delta_rule(q, k, v, g, beta, recompute=handle)
    again, _ = chunk_gated_delta_rule(q, k, v, g, beta, recompute=handle)
    assert torch.equal(first, again)
    with pytest.raises(TypeError, match="cannot be copied"):
        __import__("copy").deepcopy(handle)


def test_layer_runs_on_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        out = GatedDeltaNet(16, 1, 2, 4)(torch.randn(1, 9, 16), torch.tensor([0, 4, 9]))
    assert out.y.shape == (1, 9, 16)


def test_conv_exports_with_any_number_of_documents():
    class Conv(torch.nn.Module):
        def forward(self, x, weight, cu_seqlens):
            return causal_conv1d(x, weight, cu_seqlens=cu_seqlens).y

    weight = torch.randn(6, 4)
    auto = torch.export.Dim.AUTO
    program = torch.export.export(
        Conv(),
        (torch.randn(9, 6), weight, torch.tensor([0, 4, 9])),
        dynamic_shapes=({0: auto}, None, {0: auto}),
    )
    x, bounds = torch.randn(12, 6), torch.tensor([0, 1, 5, 12])
    out = program.module()(x, weight, bounds)
    assert torch.equal(out, causal_conv1d(x, weight, cu_seqlens=bounds).y)
