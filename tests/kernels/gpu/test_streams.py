"""Launches from several threads, streams and devices at once give the bits of quiet ones."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from longdelta import chunk_gated_delta_rule, support
from longdelta.runtime import fresh, records
from longdelta.testing.workloads import Inputs, Machine, Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or support().backend != "gluon",
        reason="no Hopper GPU, or no Triton for it",
    ),
]
GLUON = Machine("gluon", "cuda")
WORKS = [Workload(lengths=lengths, HV=8, tail=0) for lengths in ((1500, 700, 3), (64, 2100))]


def step(work: Workload, device: str = "cuda") -> list[Tensor]:
    """o and gradients of one training step; its backward runs on a thread of autograd's."""
    x = GLUON.inputs(work).to(device)
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v, x.g, x.beta)]
    o, _ = chunk_gated_delta_rule(*leaves, cu_seqlens=x.cu_seqlens, backend="gluon")
    o.backward(torch.ones_like(o))
    return [o.detach(), *(y.grad for y in leaves)]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_steps_of_two_threads_on_two_streams_keep_their_bits():
    quiet = [step(work) for work in WORKS]
    torch.cuda.synchronize()
    found: list[list[list[Tensor]]] = [[], []]

    def train(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                found[index].append(step(WORKS[index]))

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for index, steps in enumerate(found):
        assert len(steps) == 10
        for each in steps:
            assert_equal(each, quiet[index])


def test_step_resolved_afresh_has_the_bits_and_the_records_of_a_kept_one():
    step(WORKS[0])
    kept, launched = step(WORKS[0]), records()
    with fresh():
        assert_equal(step(WORKS[0]), kept)
    assert records() == launched
    assert {each.phase for each in launched} == {"forward", "backward"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_steps_of_two_devices_at_once_keep_their_bits():
    quiet = [step(work) for work in WORKS]
    found = [step(work, f"cuda:{index}") for index, work in enumerate(WORKS)]
    assert torch.cuda.current_device() == 0
    for index, each in enumerate(found):
        assert each[1].device.index == index
        assert_equal(each, quiet[index])


def test_a_graph_of_two_streams_with_other_nodes_between_replays_to_quiet_bits():
    """Kernels may start before the one in front of them has ended, whatever else lies between."""
    x, y = (GLUON.inputs(work) for work in WORKS)
    other = torch.empty(1 << 24, device="cuda")
    side = torch.cuda.Stream()

    def forward(inputs: Inputs) -> list[Tensor]:
        leaves = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
        o, state = chunk_gated_delta_rule(
            *leaves,
            cu_seqlens=inputs.cu_seqlens,
            initial_state=inputs.initial_state,
            output_final_state=True,
            backend="gluon",
        )
        return [o, state]

    quiet = [forward(x), forward(y)]
    for inputs in (x, y):  # the recordings are there before the capture
        forward(inputs)
        forward(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [forward(x)]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other.zero_()
            found.append(forward(y))
        x.q.copy_(x.q.clone())
        found.append(forward(x))
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert_equal([x for each in found for x in each], [*quiet[0], *quiet[1], *quiet[0]])
