"""One row: who is timed in which order, and what becomes of an arm that fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longdelta.bench.accuracy import fingerprint
from longdelta.bench.contest import captured, measured_ops
from longdelta.bench.results import Record, read_csv
from longdelta.bench.run import Run
from longdelta.bench.timing import Call, Slot, palindromes

from .scripted import CPU, SHORT, Scripted, arm, plan


def run(folder: Path, timer: Scripted, *names: str, **changes: object) -> list[Record]:
    arms = [arm(name) for name in names]
    return Run(plan(folder, *arms, **changes), CPU, timer).all()


def cell(records: list[Record], name: str, op: str, mode: str = "eager") -> Record:
    return next(r for r in records if (r.arm, r.op, r.mode) == (name, op, mode))


@pytest.mark.parametrize("reverse", [False, True])
def test_each_group_times_every_operation_in_palindromic_order(
    tmp_path: Path, reverse: bool
) -> None:
    timer = Scripted()
    run(tmp_path, timer, "ours", "other", reverse=reverse, ops=("fwd", "bwd"))
    slots = [slot for slot in timer.slots if slot.row]
    order = palindromes(["ours", "other"], 1, reverse)
    assert [slot.arm for slot in slots] == list(order) * 2 * SHORT.groups
    assert [(s.group, s.op) for s in slots[:: len(order)]] == [
        (group, op) for group in range(3) for op in ("fwd", "fwdbwd")
    ]


def test_backward_is_the_difference_inside_each_group(tmp_path: Path) -> None:
    def ms(slot: Slot) -> float:
        return {"fwd": 1.0, "fwdbwd": 4.0 + slot.group}.get(slot.op, 1.0)

    records = run(tmp_path, Scripted(ms), "ours", ops=("fwd", "bwd", "fwdbwd"))
    assert cell(records, "ours", "bwd").groups_ms == (3.0, 4.0, 5.0)
    assert cell(records, "ours", "bwd").ms == 4.0
    assert cell(records, "ours", "bwd").unstable
    assert not cell(records, "ours", "fwd").unstable


def test_group_latency_is_the_median_of_its_calls(tmp_path: Path) -> None:
    times = iter([1.0, 1.0] + [1.0, 3.0] * 3)
    records = run(tmp_path, Scripted(lambda slot: next(times)), "ours", ops=("fwd",))
    assert cell(records, "ours", "fwd").groups_ms == (2.0, 2.0, 2.0)


def test_missing_peer_is_named_and_the_others_are_timed(tmp_path: Path) -> None:
    absent = replace(arm("peer"), module="no_such_peer", distribution="no-such-peer")
    given, seen = plan(tmp_path, arm("ours"), absent), []
    watched = Run(given, CPU, Scripted(), lambda row, text, steps: seen.append(text))
    records = watched.all()
    assert "first call of peer" not in seen
    assert len(seen) == given.steps
    assert cell(records, "peer", "fwd").note == "not installed: pip install no-such-peer"
    assert cell(records, "peer", "fwd").ms is None
    assert cell(records, "ours", "fwd").ms == 1.0


def test_peer_that_fails_at_once_shows_its_error_and_the_others_are_timed(tmp_path: Path) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("no available\n layout found")

    records = Run(plan(tmp_path, arm("peer", fails), arm("ours")), CPU, Scripted()).all()
    for op in ("fwd", "bwd", "checkpointed"):
        assert cell(records, "peer", op).note == "RuntimeError: no available layout found"
    assert cell(records, "ours", "checkpointed").groups_ms == (1.0, 1.0, 1.0)


def test_peer_that_fails_while_timed_keeps_its_finished_groups(tmp_path: Path) -> None:
    class Breaks(Scripted):
        def measure(self, call: object, slot: Slot, *rest: int) -> tuple[object, float]:
            if slot.arm == "peer" and slot.group == 2:
                raise MemoryError("full")
            return super().measure(call, slot, *rest)  # type: ignore[arg-type]

    records = run(tmp_path, Breaks(), "ours", "peer", ops=("fwd",))
    peer = cell(records, "peer", "fwd")
    assert (peer.groups_ms, peer.note) == ((1.0, 1.0), "MemoryError: full")
    assert cell(records, "ours", "fwd").groups_ms == (1.0, 1.0, 1.0)


def test_operation_that_is_too_slow_is_named_and_the_others_are_timed(tmp_path: Path) -> None:
    class Slow(Scripted):
        def once(self, call: Call) -> tuple[object, float]:
            result, _ = super().once(call)
            assert isinstance(result, tuple)
            return result, 0.01 if len(result) == 1 else 3.0

    schedule = replace(SHORT, slowest_s=0.5)
    records = run(tmp_path, Slow(), "ours", ops=("fwd", "bwd"), schedule=schedule)
    assert cell(records, "ours", "fwd").groups_ms == (1.0, 1.0, 1.0)
    note = "one call takes 3 s: not timed above 0.5 s (--quick)"
    assert (cell(records, "ours", "bwd").groups_ms, cell(records, "ours", "bwd").note) == ((), note)


def test_wrong_peer_is_not_timed_and_its_error_is_shown(tmp_path: Path) -> None:
    wrong = arm("peer", lambda o, *_: 1.1 * o)
    timer = Scripted()
    records = Run(plan(tmp_path, arm("ours"), wrong), CPU, timer).all()
    assert "wrong against float64: o 1.0e-01" in cell(records, "peer", "fwd").note
    assert cell(records, "peer", "fwd").errors_ours.startswith("o 1.0e-01")
    assert "peer" not in {slot.arm for slot in timer.slots}


def test_peer_that_does_not_repeat_its_bits_is_marked(tmp_path: Path) -> None:
    noisy = arm("peer", lambda o, *_: o + 1e-6 * torch.rand_like(o))
    records = Run(plan(tmp_path, arm("ours"), noisy), CPU, Scripted()).all()
    assert cell(records, "peer", "fwdbwd").bits == "differ"
    assert cell(records, "ours", "fwdbwd").bits == "equal"
    assert cell(records, "ours", "checkpointed").bits == "equal"


def test_errors_stand_beside_the_times(tmp_path: Path) -> None:
    records = run(tmp_path, Scripted(), "ours", "peer")
    one = cell(records, "peer", "fwd")
    assert [part.split()[0] for part in one.errors_float64.split(", ")] == [
        "o",
        "dq",
        "dk",
        "dv",
        "dg",
        "dbeta",
    ]
    assert one.errors_ours.startswith("o 0.0e+00")
    assert (one.first_call_s, one.matmul_tflops > 0, one.flops > 0) == (0.5, True, True)


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    class Interrupted(Scripted):
        def measure(self, call: object, slot: Slot, *rest: int) -> tuple[object, float]:
            if slot.row and slot.group == 2:
                raise KeyboardInterrupt
            return super().measure(call, slot, *rest)  # type: ignore[arg-type]

    given = plan(tmp_path, arm("ours"), ops=("fwd", "fwdbwd"))
    stopped = Run(given, CPU, Interrupted())
    records = stopped.all()
    assert stopped.interrupted
    kept = cell(read_csv(given.path), "ours", "fwd")
    assert (kept.groups_ms, kept.note) == ((1.0, 1.0), "(interrupted)")
    assert len(records) == 2


@pytest.mark.gpu
def test_captured_call_replays_the_bits_of_the_eager_call() -> None:
    x = torch.randn(64, 64, device="cuda", requires_grad=True)

    def call() -> tuple[Tensor, ...]:
        y = (x @ x).exp()
        return (y.detach(), *torch.autograd.grad(y, [x], torch.ones_like(y)))

    replay = captured(call, torch.cuda.graph_pool_handle())
    for _ in range(2):
        assert fingerprint(replay()) == fingerprint(call())
        x.data.mul_(0.5)


def test_operations_that_are_timed_serve_those_that_are_asked_for() -> None:
    assert measured_ops(["bwd"]) == ("fwd", "fwdbwd")
    assert measured_ops(["checkpointed", "fwd"]) == ("fwd", "checkpointed")


def test_forward_alone_asks_no_arm_for_gradients(tmp_path: Path) -> None:
    class Only(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o):
            return o.clone()

        @staticmethod
        def backward(ctx, do):
            raise AssertionError("asked for gradients")

    ours = arm("ours", lambda o, *_: Only.apply(o))
    given = plan(tmp_path, ours, arm("other"), ops=("fwd",))
    records = Run(given, CPU, Scripted()).all()
    for name in ("ours", "other"):
        found = cell(records, name, "fwd")
        assert (found.ms, found.note) == (1.0, "")
        assert found.errors_float64.startswith("o ")
        assert "dq" not in found.errors_float64 + found.errors_ours
    with_gradients = Run(replace(given, ops=("fwd", "bwd")), CPU, Scripted()).all()
    assert "asked for gradients" in cell(with_gradients, "ours", "fwd").note
