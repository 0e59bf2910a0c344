"""A run: which rows, arms, operations and modes, on which device; and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longdelta.bench.baselines import Arm, chosen_arms, release, revision_arm
from longdelta.bench.contest import Contest, Entry, Watch, measured_ops
from longdelta.bench.problem import Place, problem_of
from longdelta.bench.results import MODES, OPS, Record, measured, write_csv
from longdelta.bench.revisions import commit_here, load_revision
from longdelta.bench.rows import Row, Suite, chosen_rows, suite_named
from longdelta.bench.timing import FULL, QUICK, SMOKE, DeviceTimer, Schedule, Timer
from longdelta.bench.work import Ceilings, measured_ceilings, work_of
from longdelta.distributed import collectives
from longdelta.errors import InvalidInput


@dataclass(frozen=True)
class Options:
    """What to run; empty tuples: everything that makes sense."""

    suite: str = "single"
    rows: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    base: str | None = None
    reverse: bool = False
    quick: bool = False
    out: Path = Path("benchmarks/results")
    commit: str = ""
    minutes: float | None = None
    """No row begins later."""


@dataclass(frozen=True)
class Plan:
    """Options, checked and resolved for this machine."""

    suite: Suite
    rows: tuple[Row, ...]
    arms: tuple[Arm, ...]
    ops: tuple[str, ...]
    modes: tuple[str, ...]
    schedule: Schedule
    reverse: bool
    path: Path
    commit: str
    minutes: float | None = None

    @property
    def steps(self) -> int:
        """Steps of the progress bar: first calls, and timed calls."""
        timed = len(measured_ops(self.ops)) * len(self.modes)
        calls = self.schedule.groups * 2 * self.schedule.rounds * timed
        here = [arm for arm in self.arms if not arm.missing()]
        return len(self.rows) * len(here) * (1 + calls)


def plan_of(options: Options, place: Place) -> Plan:
    """Checks the options against what exists here.

    Raises:
        InvalidInput: something does not exist, or the suite cannot run here; says how it can.
    """
    if options.minutes is not None and not options.minutes > 0:
        raise InvalidInput(f"minutes must be above 0, got {options.minutes:g}")
    suite = suite_named(options.suite)
    rows = chosen_rows(suite, options.rows)
    ops = _among("ops", options.ops, OPS)
    modes = _modes(_among("modes", options.modes, MODES), options.modes, place)
    _check_machine(suite, place)
    arms = chosen_arms(options.arms, place.ranks)
    if all(arm.missing() for arm in arms):
        named = "; ".join(f"{arm.name} is {arm.missing()}" for arm in arms)
        raise InvalidInput(f"arms: nothing can be measured: {named}")
    if options.base is not None:
        revision = load_revision(options.base)
        arms = (*arms, revision_arm(revision.package, revision.commit))
    schedule = SMOKE if suite.name == "smoke" else QUICK if options.quick else FULL
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    name = f"{suite.name}-{_slug(place)}-{stamp}" + ("-reversed" if options.reverse else "")
    path = options.out / f"{name}.csv"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"--out must be a folder that can be made; got {options.out}: {error}"
        ) from None
    commit = options.commit or commit_here()
    given = (options.reverse, path, commit, options.minutes)
    return Plan(suite, rows, arms, ops, modes, schedule, *given)


def _among(name: str, chosen: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    for each in chosen:
        if each not in known:
            raise InvalidInput(f"{name}: {each!r} does not exist; there are {', '.join(known)}")
    return tuple(each for each in known if each in chosen) or tuple(known)


def _modes(modes: tuple[str, ...], asked: Sequence[str], place: Place) -> tuple[str, ...]:
    """Without a GPU: eager alone, since there are no CUDA graphs to replay."""
    if place.device.type == "cuda":
        return modes
    if "replay" in asked:
        raise InvalidInput("modes: replay times CUDA graphs, which need a GPU; take eager")
    return ("eager",)


def _check_machine(suite: Suite, place: Place) -> None:
    if suite.name != "smoke" and place.device.type != "cuda":
        raise InvalidInput(
            f"suite {suite.name} needs a GPU and there is none here; "
            "longdelta bench --suite smoke runs the whole harness on a CPU"
        )
    if suite.ranks > 1 and place.ranks == 1:
        raise InvalidInput(
            f"suite {suite.name} needs {suite.ranks} ranks; start it with torchrun "
            f"--nproc-per-node {suite.ranks} -m longdelta bench --suite {suite.name}"
        )
    if suite.ranks and suite.ranks != place.ranks:
        raise InvalidInput(
            f"suite {suite.name} runs on {suite.ranks} rank{'s' * (suite.ranks > 1)}; "
            f"here are {place.ranks}"
        )


def _slug(place: Place) -> str:
    name = device_name(place).split("(")[0]
    slug = "".join(each if each.isalnum() else "-" for each in name.lower()).strip("-")
    return f"{slug.replace('nvidia-', '')}-x{place.ranks}"


def device_name(place: Place) -> str:
    """Name of the device, with its number of SMs or of torch's threads."""
    if place.device.type != "cuda":
        threads = torch.get_num_threads()
        return f"CPU ({threads} thread{'s' * (threads > 1)})"
    facts = torch.cuda.get_device_properties(place.device)
    return f"{facts.name} ({facts.multi_processor_count} SMs)"


def place_here() -> Place:
    """The group that torchrun made, or this process alone, on its GPU or one thread of the CPU.

    With more threads a time says what else ran: each operation waits for the slowest of them.
    """
    group, local = collectives.join()
    rank, ranks = collectives.place_in(group)
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    return Place(device, group, rank, ranks)


class Run:
    """A plan on a place; `records` grows cell by cell, and the file with every row."""

    def __init__(
        self, plan: Plan, place: Place, timer: Timer | None = None, watch: Watch | None = None
    ) -> None:
        self.plan = plan
        self.place = place
        self.timer = timer or DeviceTimer(place, plan.schedule.flush_bytes)
        self.watch = watch or (lambda row, text, steps: None)
        self.records: list[Record] = []
        self.interrupted = False
        self.ceilings = Ceilings(1.0, 1.0)
        self._facts = self._common()

    def _common(self) -> dict[str, Any]:
        return {
            "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "commit": self.plan.commit,
            "device": device_name(self.place),
            "torch": torch.__version__,
            "ranks": self.place.ranks,
            "suite": self.plan.suite.name,
            "order": "reversed" if self.plan.reverse else "as given",
            "protocol": str(self.plan.schedule),
        }

    def all(self) -> list[Record]:
        """Runs every row. An interrupt ends the run, and `interrupted` says so; it raises no more.

        The file is written after each row, once anything was measured.
        """
        began = time.monotonic()
        self.ceilings = measured_ceilings(self.place, self.timer, 3, 12)
        for row in self.plan.rows:
            minutes = collectives.highest(time.monotonic() - began, self.place.group) / 60
            if self.plan.minutes is not None and minutes > self.plan.minutes:
                break
            contest: Contest | None = None
            try:
                contest = Contest(
                    problem_of(row, self.place),
                    self.plan.arms,
                    self.timer,
                    self.plan.schedule,
                    self.watch,
                    gradients=set(self.plan.ops) != {"fwd"},
                )
                contest.check()
                for mode in self.plan.modes:
                    contest.time(self.plan.ops, mode, self.plan.reverse)
            except KeyboardInterrupt:
                self.interrupted = True
                self._keep(contest, " (interrupted)")
                break
            self._keep(contest, "")
            contest = None
            release(self.place.device)
        return self.records

    def _keep(self, contest: Contest | None, mark: str) -> None:
        if contest is not None:
            for entry in contest.entries:
                for mode in self.plan.modes:
                    for op in self.plan.ops:
                        self.records.append(self._record(contest, entry, op, mode, mark))
        if self.place.rank == 0 and measured(self.records):
            write_csv(self.records, self.plan.path)

    def _record(self, contest: Contest, entry: Entry, op: str, mode: str, mark: str) -> Record:
        row = contest.problem.row
        work = work_of(row, op, contest.problem.do.element_size())
        alone = entry.arm.name == "flash_qla_one_gpu"
        groups = entry.groups(op, mode, self.plan.schedule.rounds)
        same = [entry.same[op, mode]] if (op, mode) in entry.same else []
        note = entry.why_not(op, mode)
        return Record(
            **self._facts,
            row=row.name,
            H=row.H,
            HV=row.HV,
            tokens=row.tokens,
            documents=len(row.lengths),
            gates=row.gates,
            seed=row.seed,
            layout=row.layout if self.place.ranks > 1 else "",
            arm=entry.arm.name,
            says=entry.arm.says,
            version=entry.arm.version(),
            op=op,
            mode=mode,
            groups_ms=groups,
            flops=work.flops,
            bytes=work.bytes,
            floor_ms=self.ceilings.floor_ms(work, 1 if alone else self.place.ranks),
            matmul_tflops=self.ceilings.flops_per_s / 1e12,
            copy_gbs=self.ceilings.bytes_per_s / 1e9,
            peak_gib=entry.peak_gib,
            first_call_s=entry.first_call_s,
            errors_float64=_listed(entry.errors_float64),
            errors_ours=_listed(entry.errors_ours),
            bits="" if not same else "equal" if all(same) else "differ",
            base_bits=contest.base_bits if entry.arm.name == "ours" else "",
            note=(note + mark).strip(),
        )


def _listed(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
