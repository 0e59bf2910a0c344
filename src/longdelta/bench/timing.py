"""The protocol: who is timed when, how one call is timed, and what the times of groups make.

Every group runs the arms forwards and backwards (A B C C B A), so that a drift of the clocks meets
all of them alike. Before each iteration the L2 cache is flushed, the device is idle and the ranks
meet. A latency is the median of the iterations on the slowest rank; a group's latency is the median
of its calls; ratios are formed inside a group, and their median, least and greatest are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

import torch

from longdelta.bench.problem import Place
from longdelta.distributed import collectives

UNSTABLE = 0.01
"""A spread over this share of the median is marked."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Schedule:
    """How often everything is run.

    Attributes:
        groups: ratios are formed inside each.
        rounds: palindromes of a group: every arm is called 2 x rounds times.
        warmup, timed: iterations of one call.
        flush_bytes: written before each iteration.
        budget_s: where given, a call has fewer iterations (at least 1 and 3) once it would take
            longer than this.
        slowest_s: where given, an operation that takes longer than this is not timed.
    """

    groups: int = 5
    rounds: int = 2
    warmup: int = 10
    timed: int = 12
    flush_bytes: int = 256 << 20
    budget_s: float | None = None
    slowest_s: float | None = None

    def too_slow(self, seconds: float) -> str:
        """Why an operation that takes this long is not timed, or nothing."""
        if self.slowest_s is None or seconds <= self.slowest_s:
            return ""
        return f"one call takes {seconds:.2g} s: not timed above {self.slowest_s:g} s (--quick)"

    def iterations(self, estimate_s: float) -> tuple[int, int]:
        """(warm-up, timed) of a call that takes about this long; equal on ranks that agree on it.

        >>> QUICK.iterations(0.001), QUICK.iterations(0.5), Schedule().iterations(0.5)
        ((10, 12), (1, 3), (10, 12))
        """
        if self.budget_s is None:
            return self.warmup, self.timed
        fit = int(self.budget_s / max(estimate_s, 1e-9))
        return max(1, min(self.warmup, fit // 2)), max(3, min(self.timed, fit))

    def __str__(self) -> str:
        at_most = "" if self.budget_s is None else " at most"
        return (
            f"{self.groups} groups x {2 * self.rounds} calls x "
            f"({self.warmup} + {self.timed}){at_most}"
        )


FULL = Schedule()
QUICK = Schedule(groups=2, rounds=1, budget_s=0.2, slowest_s=0.25)
SMOKE = Schedule(groups=3, rounds=1, warmup=1, timed=3, flush_bytes=0)


def palindromes(names: Sequence[str], rounds: int, reverse: bool = False) -> tuple[str, ...]:
    """Order of the arms in one group.

    >>> palindromes(["A", "B"], 2)
    ('A', 'B', 'B', 'A', 'A', 'B', 'B', 'A')
    >>> palindromes(["A", "B"], 1, reverse=True)
    ('B', 'A', 'A', 'B')
    """
    ahead = tuple(reversed(names)) if reverse else tuple(names)
    return (ahead + ahead[::-1]) * rounds


class Slot(NamedTuple):
    """What a call measures."""

    row: str
    arm: str
    op: str
    mode: str
    group: int


class Timer(Protocol):
    """Times calls; tests give one without a clock."""

    def once(self, call: Call) -> tuple[object, float]:
        """The result of one call, and its wall time in seconds on the slowest rank."""
        ...

    def measure(self, call: Call, slot: Slot, warmup: int, timed: int) -> tuple[object, float]:
        """The last result, and the median time in ms on the slowest rank."""
        ...


class DeviceTimer:
    """CUDA events on a GPU, the wall clock elsewhere."""

    def __init__(self, place: Place, flush_bytes: int) -> None:
        self.place = place
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device=place.device)

    def _meet(self) -> None:
        self.flush.zero_()
        self._wait()
        collectives.barrier(self.place.group)
        self._wait()

    def _wait(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)

    def once(self, call: Call) -> tuple[object, float]:
        """The result of one call, and its wall time in seconds on the slowest rank."""
        self._meet()
        start = time.perf_counter()
        result = call()
        self._wait()
        return result, collectives.highest(time.perf_counter() - start, self.place.group)

    def measure(self, call: Call, slot: Slot, warmup: int, timed: int) -> tuple[object, float]:
        """The last result, and the median time in ms on the slowest rank."""
        result: object = None
        found: list[float] = []
        for iteration in range(warmup + timed):
            # No result outlives its iteration, so that the next one finds the memory it had.
            result = None
            result, ms = self._iteration(call)
            if iteration >= warmup:
                found.append(ms)
        return result, collectives.highest(median(found), self.place.group)

    def _iteration(self, call: Call) -> tuple[object, float]:
        self._meet()
        if self.place.device.type != "cuda":
            began = time.perf_counter()
            return call(), 1e3 * (time.perf_counter() - began)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
        return result, float(start.elapsed_time(stop))


class Ratio(NamedTuple):
    """Median, least and greatest of the per-group ratios."""

    middle: float
    low: float
    high: float

    @property
    def unstable(self) -> bool:
        """Whether the groups differ by more than `UNSTABLE`."""
        return (self.high - self.low) > UNSTABLE * abs(self.middle)

    def __str__(self) -> str:
        mark = " UNSTABLE" if self.unstable else ""
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]{mark}"


def spread(groups: Sequence[float]) -> float:
    """(greatest - least) / |median| of a cell's group latencies."""
    middle = abs(median(groups))
    return (max(groups) - min(groups)) / middle if middle else 0.0


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio | None:
    """Per-group ratios of two cells of one run; None where they share no group.

    >>> print(ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
    2.000 [2.000, 2.000]
    """
    found = [a / b for a, b in zip(above, below, strict=False) if b]
    return Ratio(median(found), min(found), max(found)) if found else None
