"""What is special to the Hopper kernels: sizes, streams, devices, graphs, and bits.

Their values are checked where those of every machine are: tests/kernels and tests/ops.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longdelta import chunk_gated_delta_rule, gdn_backward, gdn_forward, support
from longdelta.kernels.gluon import halves
from longdelta.kernels.stages import Tables
from longdelta.ops.saved import Sizes
from longdelta.ops.select import stages
from longdelta.plan.chunks import walk
from longdelta.plan.tensors import KEPT, Counts
from longdelta.runtime import launch
from longdelta.testing.workloads import (
    Cotangents,
    Inputs,
    Machine,
    Results,
    Workload,
    assert_bitwise,
    assert_results,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or support().backend != "gluon",
        reason="no Hopper GPU, or no Triton for it",
    ),
]
GLUON = Machine("gluon", "cuda")
SPLIT = Workload(lengths=(1500, 700, 64, 3), HV=8, tail=0)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Processes share the GPU, and some tests here take up to 19 GB."""
    yield
    torch.cuda.empty_cache()


def called(x: Inputs) -> dict[str, Any]:
    """Arguments of `gdn_forward`."""
    given = {field.name: getattr(x, field.name) for field in fields(x)}
    return given | {"output_final_state": True, "backend": "gluon"}


def forward(x: Inputs, **options: Any) -> Results:
    found = gdn_forward(**called(x), **options)
    return Results(found.o, found.final_state, *(None,) * 6)


def unit(*shape: int) -> Tensor:
    x = torch.randn(*shape, device="cuda")
    return torch.nn.functional.normalize(x, dim=-1).to(BF16)


def rates(*shape: int) -> Tensor:
    """Gates, or the logarithms of betas."""
    return torch.nn.functional.logsigmoid(torch.randn(*shape, device="cuda"))


def document(x: Inputs, first: int, last: int, state: int | None) -> Inputs:
    """Rows of one document, copied, as a batch of its own."""
    rows = [getattr(x, n)[:, first:last].contiguous() for n in ("q", "k", "v", "g", "beta")]
    return Inputs(*rows, None if state is None else x.initial_state[state : state + 1], None)


SHAPES = {
    "six heads a group, two blocks of heads": Workload(lengths=(200, 65), H=1, HV=6),
    "32 heads, model-like gates": Workload(lengths=(130, 70), H=16, HV=32, gates="model"),
    "segments of 32 chunks": Workload(lengths=(4100, 64), gates="slow", betas="small", HV=2),
}


@pytest.mark.parametrize("work", SHAPES.values(), ids=SHAPES)
def test_op_matches_the_recurrence_for_more_heads_and_longer_segments(work):
    assert_results(GLUON.run(work, BF16), GLUON.expected(work), GLUON.budgets(work))


def test_a_thousand_calls_give_the_same_bits():
    x = GLUON.inputs(SPLIT)
    first = forward(x)
    for _ in range(1000):
        again = forward(x)
        assert torch.equal(again.o, first.o)
        assert torch.equal(again.final_state, first.final_state)


def test_five_hundred_backwards_of_a_full_device_give_the_same_bits():
    """One in twenty had another dg in one chunk: docs/log.md, 2026-12-01, the race is gone."""
    T, H, HV = 8 * 4096, 16, 48
    v = torch.randn(1, T, HV, 128, device="cuda").to(BF16)
    gates = rates(1, T, HV) / 16, rates(1, T, HV).exp()
    leaves = [y.requires_grad_() for y in (unit(1, T, H, 128), unit(1, T, H, 128), v, *gates)]
    offsets = torch.arange(0, T + 1, 4096, device="cuda")
    o, _ = chunk_gated_delta_rule(*leaves, cu_seqlens=offsets, backend="gluon")
    do = torch.randn_like(o)
    first = torch.autograd.grad(o, leaves, do, retain_graph=True)
    differing = torch.zeros(len(leaves), dtype=torch.int64, device="cuda")
    for _ in range(500):
        found = torch.autograd.grad(o, leaves, do, retain_graph=True)
        differing += torch.stack([(a != b).any() for a, b in zip(found, first, strict=True)])
    assert differing.tolist() == [0] * len(leaves)


def test_launches_resolved_afresh_have_the_bits_of_kept_ones():
    x = GLUON.inputs(SPLIT)
    kept = [forward(x), forward(x)]
    names = [record.program for record in launch.records() if record.phase == "forward"]
    assert names == [f"{stage}_kernel" for stage in ("prepare", "summarize", "fold", "scan")]
    with launch.fresh():
        assert_bitwise(forward(x), kept[0])
    assert_bitwise(kept[1], kept[0])


@pytest.mark.parametrize("options", [{}, {"save": "full"}, {"state_v_first": True}], ids=str)
def test_recorded_calls_have_the_bits_of_calls_resolved_afresh(options):
    """On inputs of their own, in tensors of their own; the third call is the first recorded one."""
    for seed in range(5):
        x = GLUON.inputs(replace(SPLIT, seed=seed))
        if "state_v_first" in options:
            x = x.with_(initial_state=x.initial_state.transpose(-1, -2).contiguous())
        found = forward(x, **options)
        with launch.fresh():
            assert_bitwise(found, forward(x, **options))


def borders(documents: int, HV: int) -> tuple[Tables, Tensor, Tensor, Tensor]:
    """Tables of split documents; M, its bounds, and states of their segments, all random."""
    offsets = [6400 * document for document in range(documents + 1)]
    plan = walk(offsets, HV)
    assert plan.maps >= 2 * documents
    M = torch.randn(plan.maps, HV, 128, 128, device="cuda") / 16
    S = torch.randn(plan.borders, HV, 128, 128, device="cuda")
    return Tables(plan, torch.device("cuda")), M, torch.zeros(plan.maps, HV, device="cuda"), S


@pytest.mark.parametrize(
    "work",
    [
        SPLIT,
        Workload(lengths=(37, 0, 130, 1, 64), H=1, HV=3, gates="reset", initial=False),
        Workload(lengths=(300,) * 90, H=2, HV=4),  # more tasks than multiprocessors
    ],
    ids=["split", "ragged", "many"],
)
@pytest.mark.parametrize("options", [{}, {"save": "full"}, {"state_v_first": True}], ids=str)
def test_halves_of_walks_have_the_bits_of_whole_ones(monkeypatch, work, options):
    x, cotangents = GLUON.inputs(work, BF16), GLUON.cotangents(work, BF16)
    found = []
    for groups in (2, 1):
        monkeypatch.setattr(halves, "groups_of", lambda tables, HV, groups=groups: groups)
        with launch.fresh():
            found.append(GLUON.evaluate(x, cotangents, **options))
    assert_bitwise(*found)


@pytest.mark.parametrize("adjoint", [False, True], ids=["fold", "adjoint_fold"])
def test_fold_of_many_chains_gives_each_the_bits_that_it_has_alone(adjoint):
    tables, M, M_bound, S = borders(40, 16)
    gluon = stages("gluon")
    fold, name = (gluon.adjoint_fold, "dS") if adjoint else (gluon.fold, "S")
    together, alone = S.clone(), S.clone()
    fold(M, M_bound, tables, tables.walk.chains, **{name: together})
    for chain in tables.walk.chains:
        fold(M, M_bound, tables, (chain,), **{name: alone})
    assert torch.equal(together, alone)
    assert not torch.equal(together, S)


@pytest.mark.parametrize("adjoint", [False, True], ids=["fold", "adjoint_fold"])
def test_fold_leaves_states_bit_by_bit_where_what_entered_is_forgotten(adjoint):
    """Whether all of a chain is forgotten or a part of it; M is not looked at there."""
    tables, M, M_bound, S = borders(2, 4)
    chains = tables.walk.chains
    middle = [tables.walk.segments[index] for index in chains[1]]
    forgotten = {s.map for s in (tables.walk.segments[index] for index in chains[0])}
    forgotten.add(middle[1].map)
    S[middle[1].leave, :, 0] = S[middle[1].enter, :, 0] = -0.0
    M[list(forgotten)], M_bound[list(forgotten)] = float("nan"), -20.0
    gluon = stages("gluon")
    fold, name = (gluon.adjoint_fold, "dS") if adjoint else (gluon.fold, "S")
    found = S.clone()
    fold(M, M_bound, tables, chains, **{name: found})
    assert found.isfinite().all()
    for s in tables.walk.segments:
        into = s.enter if adjoint else s.leave
        if s.map in forgotten:
            assert torch.equal(found[into].view(torch.int32), S[into].view(torch.int32))
        elif s.map >= 0:
            assert not torch.equal(found[into], S[into])


def test_a_document_keeps_its_bits_beside_one_of_nan_and_inf():
    work = Workload(lengths=(70, 90, 33), tail=0)
    x = GLUON.inputs(work)
    clean = forward(x)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(x, name)[:, 70:120] = float("nan")
        getattr(x, name)[:, 120:160] = float("inf")
    dirty = forward(x)
    for rows in (slice(0, 70), slice(160, 193)):
        assert torch.equal(clean.o[:, rows], dirty.o[:, rows])
    for index in (0, 2):
        assert torch.equal(clean.final_state[index], dirty.final_state[index])


def test_views_of_a_packed_projection_are_read_in_place_with_the_same_bits():
    from longdelta.kernels.gluon.tiles import in_place

    x = GLUON.inputs(SPLIT)
    packed = torch.full((1, SPLIT.rows, 12, 128), float("nan"), dtype=BF16, device="cuda")
    views = {"q": packed[:, :, :2], "k": packed[:, :, 2:4], "v": packed[:, :, 4:]}
    for name, view in views.items():
        view.copy_(getattr(x, name))
        assert in_place(view[0]).data_ptr() == view.data_ptr()
    assert_bitwise(forward(x.with_(**views)), forward(x))


def test_rows_of_a_packed_projection_beyond_two_to_the_31_elements():
    T, last = 175_000, 200
    packed = torch.zeros(1, T, 96, 128, dtype=BF16, device="cuda")  # 4.3 GB
    assert (T - last) * packed.stride(1) > 2**31
    for heads in (slice(0, 1), slice(1, 2), slice(94, 96)):
        packed[:, -last:, heads] = unit(1, last, heads.stop - heads.start, 128)
    x = Inputs(
        packed[:, :, :1],
        packed[:, :, 1:2],
        packed[:, :, 94:],
        rates(1, T, 2) / 16,
        rates(1, T, 2).exp(),
        None,
        torch.tensor([0, T - last, T]),
    )
    alone = forward(document(x, T - last, T, None))
    assert torch.equal(forward(x).o[:, -last:], alone.o)


def test_outputs_beyond_two_to_the_31_elements():
    HV, long, last = 64, 2**18, 100
    T = long + last
    v = torch.zeros(1, T, HV, 128, dtype=BF16, device="cuda")  # 4.3 GB, o as much
    v[:, long:] = unit(1, last, HV, 128)
    x = Inputs(
        unit(1, T, 1, 128),
        unit(1, T, 1, 128),
        v,
        rates(1, T, HV),
        rates(1, T, HV).exp(),
        None,
        torch.tensor([0, long, T]),
    )
    assert long * v.stride(1) >= 2**31
    found, alone = forward(x), forward(document(x, long, T, None))
    assert torch.equal(found.o[:, long:], alone.o)
    assert torch.equal(found.final_state[1:], alone.final_state)
    assert not found.o[:, :long].any()


def many_documents(N: int, HV: int) -> Inputs:
    """N documents of eight tokens, with states; 8.6 GB of them for 131,136 heads and documents."""
    T = 8 * N
    return Inputs(
        unit(1, T, HV, 128),
        unit(1, T, HV, 128),
        unit(1, T, HV, 128),
        rates(1, T, HV),
        rates(1, T, HV).exp(),
        torch.randn(N, HV, 128, 128, device="cuda"),
        8 * torch.arange(N + 1),
    )


def test_states_beyond_two_to_the_31_elements_and_more_than_65535_documents_and_heads():
    N, HV = 2049, 64
    x = many_documents(N, HV)
    assert x.initial_state[:-1].numel() >= 2**31
    found = forward(x)
    for n in (0, N // 2 + 1, N - 1):
        rows = slice(8 * n, 8 * n + 8)
        alone = forward(document(x, rows.start, rows.stop, n))
        assert torch.equal(found.o[:, rows], alone.o)
        assert torch.equal(found.final_state[n : n + 1], alone.final_state)


def test_tapes_beyond_two_to_the_31_elements():
    N, HV = 2049, 64
    x = many_documents(N, HV)
    saved = gdn_forward(**called(x) | {"output_final_state": False}, save="full").saved.tensor
    counts = Counts.of(walk(x.cu_seqlens.tolist(), HV, rows=8 * N))
    tapes = Sizes(counts, HV, 128, 128, BF16, "gluon").views(KEPT["full"], saved)
    assert tapes["S"][:-1].numel() >= 2**31
    assert torch.equal(tapes["S"][-1], x.initial_state[-1].to(BF16))
    assert torch.equal(tapes["S"][N // 2], x.initial_state[N // 2].to(BF16))


def test_every_element_is_written_while_another_stream_holds_multiprocessors():
    x = GLUON.inputs(SPLIT)
    quiet = forward(x)
    a = torch.randn(8192, 8192, dtype=BF16, device="cuda")
    busy = torch.cuda.Stream()
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory then is full of NaN
    for _ in range(5):
        busy.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(busy):
            for _ in range(4):
                a @ a
        assert_bitwise(forward(x), quiet)


def test_a_call_runs_on_the_stream_that_is_current():
    x = GLUON.inputs(SPLIT)
    quiet, side = forward(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # so that a launch on another stream would run too early
        moved = x.with_(v=x.v + 0)
        found = forward(moved)
    side.synchronize()
    assert_bitwise(found, quiet)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_a_call_on_a_device_that_is_not_the_current_one():
    x, cotangents = GLUON.inputs(SPLIT), GLUON.cotangents(SPLIT)
    here = GLUON.evaluate(x, cotangents)
    there = Machine("gluon", "cuda:1").evaluate(x, cotangents)
    assert torch.cuda.current_device() == 0
    assert there.dq.device == there.o.device == torch.device("cuda:1")
    assert_bitwise(Results(*(y.to("cuda:0") for y in there)), here)


def both(x: Inputs, cotangents: Cotangents, backward: bool) -> Results:
    found = gdn_forward(**called(x), save="light")
    gradients = [None] * 6
    if backward:
        gradients = gdn_backward(*cotangents, **called(x), saved=found.saved)[:6]
    return Results(found.o, found.final_state, *gradients)


@pytest.mark.parametrize("backward", [False, True])
def test_a_captured_graph_replays_with_other_contents(backward):
    x, cotangents = GLUON.inputs(SPLIT), GLUON.cotangents(SPLIT)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            both(x, cotangents, backward)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(x, cotangents, backward)
    for seed in (1, 2):
        other = GLUON.inputs(Workload(lengths=SPLIT.lengths, HV=8, tail=0, seed=seed))
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            getattr(x, name).copy_(getattr(other, name))
        graph.replay()
        replayed = Results(*(y if y is None else y.clone() for y in found))
        assert_bitwise(replayed, both(other, cotangents, backward))


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_that_was_made_before_never_waits_for_the_device(backward):
    x, cotangents = GLUON.inputs(SPLIT), GLUON.cotangents(SPLIT)
    before = both(x, cotangents, backward)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = both(x, cotangents, backward)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_bitwise(again, before)


def test_first_call_finds_every_kernel_compiled_ahead(tmp_path, record_property):
    command = [sys.executable, str(Path(__file__).with_name("first_call.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record_property("first call", done.stdout.strip())


def test_fifty_random_packings_compile_nothing(monkeypatch):
    from triton import knobs

    whole, halved = Workload(lengths=(800,) * 11, HV=8), Workload(lengths=(300,), HV=8)
    for work in (SPLIT, whole, halved):  # decision 0019: both ways of walking
        forward(GLUON.inputs(work))
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append("a kernel")
    )
    draw = random.Random(5)
    for _ in range(50):
        lengths = tuple(draw.randrange(0, 900) for _ in range(draw.randrange(1, 12)))
        forward(GLUON.inputs(Workload(lengths=lengths, HV=8, tail=draw.randrange(3))))
    assert not compiled
