"""A timer without a clock, and arms that do what a test wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import longdelta
from longdelta.bench.baselines import ANY, Arm, Runner, own
from longdelta.bench.problem import Place, Problem
from longdelta.bench.rows import Row
from longdelta.bench.run import Options, Plan, plan_of
from longdelta.bench.timing import Call, Schedule, Slot

CPU = Place(torch.device("cpu"))
ROW = Row("row", 1, 2, (70, 1, 20), "mild", seed=5, K=8, V=8)
SHORT = Schedule(groups=3, rounds=1, warmup=0, timed=1, flush_bytes=0)


class Scripted:
    """Makes each call once and answers with the time that `ms` has for its slot."""

    def __init__(self, ms: Callable[[Slot], float] = lambda slot: 1.0) -> None:
        self.ms = ms
        self.slots: list[Slot] = []
        self.iterations: list[tuple[int, int]] = []

    def once(self, call: Call) -> tuple[object, float]:
        return call(), 0.5

    def measure(self, call: Call, slot: Slot, warmup: int, timed: int) -> tuple[object, float]:
        self.slots.append(slot)
        self.iterations.append((warmup, timed))
        return call(), self.ms(slot)


def arm(name: str, op: Callable[..., Tensor] | None = None, **options: Any) -> Arm:
    """Our op under a name, with what `op(o, *inputs)` makes of its output."""

    def build(problem: Problem) -> Runner:
        runner = own(longdelta, True)(problem)
        if op is None:
            return runner
        return replace(runner, op=lambda *x: op(runner.op(*x), *x))

    return Arm(name, name, ANY, build, **options)


def plan(folder: Path, *arms: Arm, **changes: Any) -> Plan:
    """The smoke suite's plan with one small row and these arms."""
    found = plan_of(Options(suite="smoke", out=folder), CPU)
    given = {"rows": (ROW,), "arms": arms, "schedule": SHORT, "modes": ("eager",)} | changes
    return replace(found, **given)
