"""One row: every arm is built, checked and timed, and what fails stays in its own cell."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from longdelta.bench import accuracy
from longdelta.bench.baselines import Arm, Runner, cotangent, release, whole_inputs
from longdelta.bench.problem import Place, Problem
from longdelta.bench.results import OPS
from longdelta.bench.rows import Row
from longdelta.bench.timing import Call, Schedule, Slot, Timer, palindromes
from longdelta.distributed import collectives

Cell = tuple[str, str]
"""(operation, mode)."""
MEASURED = {"bwd": ("fwd", "fwdbwd")}
"""What is timed for an operation that is not timed itself."""
Watch = Callable[[Row, str, int], None]
"""Told on which row what begins, and how many steps it is."""


@dataclass
class Entry:
    """What is known of one arm on the row; `note`: why it is not timed."""

    arm: Arm
    runner: Runner | None = None
    leaves: tuple[Tensor, ...] = ()
    do: Tensor | None = None
    note: str = ""
    first_call_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_gib: float = 0.0
    errors_float64: dict[str, float] = field(default_factory=dict)
    errors_ours: dict[str, float] = field(default_factory=dict)
    bits: tuple[int, ...] = ()
    launches: tuple[str, ...] = ()
    same: dict[Cell, bool] = field(default_factory=dict)
    notes: dict[Cell, str] = field(default_factory=dict)
    calls: dict[Cell, list[list[float]]] = field(default_factory=dict)

    def groups(self, op: str, mode: str, rounds: int) -> tuple[float, ...]:
        """Latency of each complete group: the median of its calls."""
        if op == "bwd":
            ahead, both = (self.groups(each, mode, rounds) for each in MEASURED["bwd"])
            return tuple(b - a for a, b in zip(ahead, both, strict=False))
        found = self.calls.get((op, mode), [])
        return tuple(median(group) for group in found if len(group) == 2 * rounds)

    def why_not(self, op: str, mode: str) -> str:
        """Why a cell is empty or incomplete, or nothing."""
        parts = MEASURED.get(op, (op,))
        notes = [self.notes[part, mode] for part in parts if (part, mode) in self.notes]
        return self.note or "; ".join(dict.fromkeys(notes))


def measured_ops(ops: Sequence[str]) -> tuple[str, ...]:
    """The operations to time for those that are asked for.

    >>> measured_ops(["bwd", "checkpointed"])
    ('fwd', 'fwdbwd', 'checkpointed')
    """
    wanted = {part for op in ops for part in MEASURED.get(op, (op,))}
    return tuple(op for op in OPS if op in wanted)


def operation(entry: Entry, op: str) -> Call:
    """The timed function of an arm: outputs and gradients of the public autograd function."""
    runner, leaves, do = entry.runner, entry.leaves, entry.do
    assert runner is not None
    if not runner.active:
        return lambda: ()
    function, checkpoint = runner.op, runner.checkpoint

    def forward() -> tuple[Tensor, ...]:
        return (function(*leaves).detach(),)

    def both() -> tuple[Tensor, ...]:
        o = function(*leaves)
        return (o.detach(), *torch.autograd.grad(o, leaves, do))

    def checkpointed() -> tuple[Tensor, ...]:
        o = checkpoint(function, *leaves)
        return (o.detach(), *torch.autograd.grad(o, leaves, do))

    return {"fwd": forward, "fwdbwd": both, "checkpointed": checkpointed}[op]


def captured(call: Call, pool: Any) -> Call:
    """A call as one CUDA graph; its results stay where the capture put them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = call()

    def replay() -> object:
        graph.replay()
        return result

    return replay


def launch_module(family: str) -> Any:
    """`runtime.launch` of this package or a revision; None where it has none."""
    if not family or importlib.util.find_spec(f"{family}.runtime") is None:
        return None
    name = f"{family}.runtime.launch"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


class Contest:
    """All arms on one row. gradients: whether they are asked for, and so checked."""

    def __init__(
        self,
        problem: Problem,
        arms: Sequence[Arm],
        timer: Timer,
        schedule: Schedule,
        watch: Watch,
        gradients: bool = True,
    ) -> None:
        self.problem = problem
        self.timer = timer
        self.schedule = schedule
        self.watch = watch
        self.entries = [Entry(arm) for arm in arms]
        self.base_bits = ""
        self._gradients = gradients
        self._ours: tuple[Tensor, ...] = ()
        self._cut = accuracy.cut_of(problem.row)

    @property
    def place(self) -> Place:
        """Where this process runs."""
        return self.problem.place

    @property
    def _results(self) -> tuple[str, ...]:
        """What is checked."""
        return accuracy.RESULTS if self._gradients else accuracy.RESULTS[:1]

    def check(self) -> None:
        """Builds every arm, runs it for the first time, and compares its results."""
        expected = accuracy.expected(self.problem, self._cut, self._gradients)
        do = accuracy.cut_cotangent(self.problem, self._cut)
        for entry in sorted(self.entries, key=lambda each: each.arm.name != "ours"):
            entry.note = entry.arm.missing()
            if not entry.note:
                self.watch(self.problem.row, f"first call of {entry.arm.name}", 1)
                entry.note = self._attempt(partial(self._begin, entry))
            if not entry.note:
                entry.note = self._attempt(partial(self._judge, entry, do, expected))
            if entry.note:
                entry.runner, entry.leaves, entry.do = None, (), None
            release(self.place.device)
        self._ours = ()
        self.base_bits = self._against_base()

    def _against_base(self) -> str:
        """Our default arm against the revision on every rank: results, and launch records."""
        named = {entry.arm.name: entry for entry in self.entries if entry.runner is not None}
        if "base" not in named or "ours" not in named:
            return ""
        ours, base = named["ours"], named["base"]
        pairs = ((ours.bits, base.bits), (ours.launches, base.launches))
        said = [
            "differ" if collectives.highest(float(a != b), self.place.group) else "equal"
            for a, b in pairs
        ]
        return f"{said[0]}; launch records {said[1]}"

    def _attempt(self, step: Callable[[], None]) -> str:
        """Runs a step on every rank; why it failed on any, or nothing."""
        note = ""
        try:
            step()
        except Exception as error:  # noqa: BLE001  a peer may raise anything; its cell says what
            text = " ".join(str(error).split())
            note = f"{type(error).__name__}: {text[:300]}"
        anywhere = collectives.highest(float(bool(note)), self.place.group)
        return note or ("failed on another rank" if anywhere else "")

    def _begin(self, entry: Entry) -> None:
        entry.runner = entry.arm.build(self.problem)
        entry.leaves = whole_inputs(self.problem, entry.runner)
        entry.do = cotangent(self.problem, entry.runner)
        call = operation(entry, "fwdbwd" if self._gradients else "fwd")
        entry.first_call_s = self.timer.once(call)[1]
        launch = launch_module(entry.arm.family)
        if launch is not None:
            launch.forget_records()
        held = self._memory(reset=True)
        results, seconds = self.timer.once(call)
        entry.peak_gib = collectives.highest(self._memory() - held, self.place.group) / 2**30
        if launch is not None:
            entry.launches = tuple(map(repr, launch.records()))
        entry.bits = accuracy.fingerprint(results)
        self._compare(entry, results)
        del results
        _, ahead = self.timer.once(operation(entry, "fwd"))
        entry.seconds = {"fwd": ahead, "fwdbwd": seconds, "checkpointed": ahead + seconds}

    def _memory(self, reset: bool = False) -> float:
        device = self.place.device
        if device.type != "cuda":
            return 0.0
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
            return float(torch.cuda.memory_allocated(device))
        return float(torch.cuda.max_memory_allocated(device))

    def _compare(self, entry: Entry, results: Any) -> None:
        """Against our own arm on the whole row; "ours" comes first and is kept."""
        runner = entry.runner
        assert runner is not None
        if entry.arm.name == "ours":
            self._ours = tuple(runner.whole(x) for x in results)
        elif self._ours:
            found = {
                name: accuracy.distance(runner.whole(x), mine)
                for name, x, mine in zip(self._results, results, self._ours, strict=False)
            }
            entry.errors_ours = self._agreed(found)

    def _agreed(self, errors: dict[str, float]) -> dict[str, float]:
        """The greatest over ranks; a rank that computes nothing has none of its own."""
        return {
            name: collectives.highest(errors.get(name, 0.0), self.place.group)
            for name in self._results
        }

    def _judge(self, entry: Entry, do: Tensor, expected: Sequence[Tensor]) -> None:
        """Against float64 on a cut of the row, Note [Cut]; raises where the arm is wrong."""
        runner, row = entry.runner, self.problem.row
        assert runner is not None
        found: dict[str, float] = {}
        if runner.active:
            o = runner.op(*entry.leaves)
            results = [o.detach()]
            if self._gradients:
                results += torch.autograd.grad(o, entry.leaves, cotangent(self.problem, runner, do))
            found = {
                name: accuracy.distance(self._cut.of(runner.whole(x), row), ref)
                for name, x, ref in zip(self._results, results, expected, strict=True)
            }
        entry.errors_float64 = self._agreed(found)
        why = accuracy.verdict(entry.errors_float64, row.gates)
        if why:
            raise ArithmeticError(why)

    def time(self, ops: Sequence[str], mode: str, reverse: bool) -> None:
        """Times every arm that passed, group by group."""
        wanted = measured_ops(ops)
        ready = self._ready(wanted, mode)
        names = [entry.arm.name for entry in self.entries if not entry.arm.missing()]
        entries = {entry.arm.name: entry for entry in self.entries}
        for group in range(self.schedule.groups):
            for op in wanted:
                last: dict[str, object] = {}
                for name in palindromes(names, self.schedule.rounds, reverse):
                    self.watch(self.problem.row, f"{mode} {op}, group {group + 1}", 1)
                    slot = Slot(self.problem.row.name, name, op, mode, group)
                    if (name, op) in ready:
                        self._measure(entries[name], ready, slot, last)
                for name, results in last.items():
                    self._fingerprint(entries[name], (op, mode), results)
                last.clear()
        ready.clear()
        release(self.place.device)

    def _ready(self, ops: Sequence[str], mode: str) -> dict[tuple[str, str], Call]:
        """What can be timed: calls, or graphs of calls."""
        ready: dict[tuple[str, str], Call] = {}
        runs = [entry for entry in self.entries if entry.runner is not None]
        # One pool an arm: its graphs never run at once; a failed capture harms no other arm.
        graphs = mode == "replay"
        pools = {e.arm.name: torch.cuda.graph_pool_handle() if graphs else None for e in runs}
        # All forwards first: they are small, and graphs keep their memory.
        for op in ops:
            for entry in runs:
                self._prepare(entry, op, mode, pools[entry.arm.name], ready)
        return ready

    def _prepare(
        self, entry: Entry, op: str, mode: str, pool: Any, ready: dict[tuple[str, str], Call]
    ) -> None:
        call, cell = operation(entry, op), (op, mode)
        slow = self.schedule.too_slow(entry.seconds[op])
        if slow:
            entry.notes[cell] = slow
        elif mode == "eager":
            ready[entry.arm.name, op] = call
        else:
            found: list[Call] = []

            def capture() -> None:
                if op != "fwd":
                    self._check_room(entry)
                found.append(captured(call, pool))

            note = self._attempt(capture)
            if note:
                entry.notes[cell] = f"cannot be captured: {note}"
                release(self.place.device)
            else:
                ready[entry.arm.name, op] = found[0]

    def _check_room(self, entry: Entry) -> None:
        """Raises before a capture that would not fit: one that fails half-way is hard to undo."""
        torch.cuda.empty_cache()
        here = torch.cuda.mem_get_info(self.place.device)[0] / 2**30
        free = -collectives.highest(-here, self.place.group)
        if entry.peak_gib > free:
            raise MemoryError(f"needs {entry.peak_gib:.1f} GiB, {free:.1f} are free")

    def _measure(
        self,
        entry: Entry,
        ready: dict[tuple[str, str], Call],
        slot: Slot,
        last: dict[str, object],
    ) -> None:
        call, cell = ready[slot.arm, slot.op], (slot.op, slot.mode)
        groups = entry.calls.setdefault(cell, [])
        if len(groups) <= slot.group:
            groups.append([])

        def step() -> None:
            last.pop(slot.arm, None)
            iterations = self.schedule.iterations(entry.seconds[slot.op])
            last[slot.arm], ms = self.timer.measure(call, slot, *iterations)
            groups[slot.group].append(ms)

        note = self._attempt(step)
        if note:
            entry.notes[cell] = note
            del ready[slot.arm, slot.op]
            last.pop(slot.arm, None)
            release(self.place.device)

    def _fingerprint(self, entry: Entry, cell: Cell, results: object) -> None:
        """Whether a group gave the bits of the first eager call, on every rank."""
        found = accuracy.fingerprint(results)
        differs = float(found != entry.bits[: len(found)])
        equal = not collectives.highest(differs, self.place.group)
        entry.same[cell] = entry.same.get(cell, True) and equal
