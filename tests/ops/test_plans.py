"""Boundaries from tensors to tables: which tensors are read, when, and how often."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from longdelta import InvalidInput, chunk_gated_delta_rule
from longdelta.ops import plans
from longdelta.testing.workloads import NAMED, Workload, assert_bitwise, evaluate

WORK = NAMED["mild"]


@pytest.fixture
def reads(monkeypatch):
    """Counts copies of a boundary tensor to the host, with the CPU in the place of a device."""
    monkeypatch.setattr(plans, "READ_EVERY_TIME", frozenset())
    counted = []
    original = torch.Tensor.tolist

    def tolist(self):
        counted.append(tuple(self.shape))
        return original(self)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    return counted


def run(cu_seqlens, **options):
    inputs = WORK.inputs(torch.float32).with_(cu_seqlens=cu_seqlens)
    return evaluate(inputs, WORK.cotangents(torch.float32), **options)


def test_int32_int64_and_the_host_copy_give_the_same_bits(machine):
    backend, device = machine
    offsets = torch.tensor(WORK.offsets)
    inputs, cotangents = machine.inputs(WORK), machine.cotangents(WORK)
    ref = evaluate(inputs, cotangents, backend=backend)
    for x, host in (
        (offsets.to(device), None),
        (offsets.int().to(device), None),
        (offsets, None),  # on the CPU whatever the device
        (None, offsets),
        (offsets.to(device), offsets.int()),
    ):
        out = evaluate(inputs.with_(cu_seqlens=x), cotangents, cu_seqlens_cpu=host, backend=backend)
        assert_bitwise(out, ref)


def test_boundaries_are_read_once_for_many_calls_and_their_backward(reads):
    cu_seqlens = torch.tensor(WORK.offsets)
    first = run(cu_seqlens)
    for _ in range(3):
        assert_bitwise(run(cu_seqlens), first)
    assert len(reads) == 1


@pytest.mark.parametrize("around", ["checkpoint", "compile"])
def test_two_layers_read_the_boundaries_once_under(reads, around):
    x = WORK.inputs(torch.float32)

    def layers(q, k, v, g, beta, cu_seqlens):
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)
        return chunk_gated_delta_rule(q, k, o, g, beta, cu_seqlens=cu_seqlens)[0]

    if around == "compile":
        torch._dynamo.reset()
        run_layers = torch.compile(layers, backend="aot_eager", fullgraph=True, dynamic=True)
    else:

        def run_layers(*given):
            return checkpoint(layers, *given, use_reentrant=False)

    leaves = [y.clone().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta)]
    found = []
    for _ in range(2):
        o = run_layers(*leaves, x.cu_seqlens)
        found.append(torch.autograd.grad(o, leaves, torch.ones_like(o)))
    assert len(reads) == 1
    o = layers(*leaves, x.cu_seqlens)
    plain = torch.autograd.grad(o, leaves, torch.ones_like(o))
    for gradients in found:
        for y, z in zip(gradients, plain, strict=True):
            assert torch.equal(y, z)


def test_boundaries_changed_in_place_are_read_again(reads):
    cu_seqlens = torch.tensor(WORK.offsets)
    before = run(cu_seqlens)
    moved = torch.tensor([0, 30, 37, 140, 160, 200])
    cu_seqlens.copy_(moved)
    after = run(cu_seqlens)
    assert len(reads) == 2
    assert_bitwise(after, run(moved.clone()))
    assert not torch.equal(before.o, after.o)


def test_boundaries_that_share_memory_with_an_array_are_read_again():
    array = np.array(WORK.offsets)
    shared = torch.from_numpy(array)
    before = run(shared)
    array[:] = [0, 30, 37, 140, 160, 200]
    after = run(shared)
    assert_bitwise(after, run(torch.tensor([0, 30, 37, 140, 160, 200])))
    assert not torch.equal(before.o, after.o)


def test_a_device_tensor_is_not_read_where_the_host_copy_is_given(reads):
    host = torch.tensor(WORK.offsets)
    run(host)
    reads.clear()
    run(torch.tensor(WORK.offsets), cu_seqlens_cpu=host)
    assert reads == []


def test_equal_boundaries_in_another_tensor_share_their_tables():
    found = [
        plans.tables_of(
            torch.tensor([0, 5, 70]),
            None,
            B=1,
            T=70,
            HV=2,
            deterministic=True,
            device=torch.device("cpu"),
        )
        for _ in range(2)
    ]
    assert found[0] is found[1]
    assert found[0].walk.chunk_length == (5, 64, 1)


def test_a_boundary_tensor_that_is_gone_is_forgotten():
    cu_seqlens = torch.tensor([0, 7])
    assert plans.remembered_offsets(cu_seqlens) == (0, 7)
    key = id(cu_seqlens)
    assert key in plans._read
    del cu_seqlens
    assert key not in plans._read


def test_boundaries_made_in_inference_mode_work():
    with torch.inference_mode():
        cu_seqlens = torch.tensor(WORK.offsets)
        assert plans.host_offsets(cu_seqlens) == WORK.offsets
        inputs = WORK.inputs(torch.float32).with_(cu_seqlens=cu_seqlens)
        out = evaluate(inputs, WORK.cotangents(torch.float32), leaves=())
    assert_bitwise(out, run(torch.tensor(WORK.offsets)))


@pytest.mark.parametrize(
    ("offsets", "came"),
    [
        ([1, 5], "cu_seqlens[0] is 1"),
        ([0, 5, 3], "cu_seqlens[1] = 5 is followed by 3"),
        ([0, 9], "T = 8"),
        ([0, -1, 4], "cu_seqlens[0] = 0 is followed by -1"),
    ],
)
@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_cpu"])
def test_wrong_boundaries_are_refused_by_what_they_hold(name, offsets, came):
    work = Workload(lengths=(8,), tail=0, initial=False)
    inputs = work.inputs(torch.float32).with_(cu_seqlens=None)
    with pytest.raises(InvalidInput, match="cu_seqlens must") as error:
        chunk_gated_delta_rule(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            **{name: torch.tensor(offsets)},
        )
    assert came in str(error.value)
