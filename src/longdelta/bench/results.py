"""What was measured, one record a cell, and its CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from longdelta.bench.timing import UNSTABLE, spread
from longdelta.errors import InvalidInput

OPS = ("fwd", "bwd", "fwdbwd", "checkpointed")
MODES = ("eager", "replay")
TITLES = {
    "fwd": "forward",
    "bwd": "backward (= forward+backward - forward)",
    "fwdbwd": "forward+backward",
    "checkpointed": "checkpointed 2 x forward+backward",
}


@dataclass(frozen=True)
class Record:
    """One arm, operation and mode on one row, and the run that it comes from.

    Attributes:
        order: of the arms: "as given" or "reversed".
        groups_ms: latency of each group; empty where nothing was timed, and `note` says why.
        floor_ms: least time by this run's ceilings, see `longdelta.bench.work`.
        peak_gib: memory of a forward and a backward beyond the inputs, on the fullest rank.
        first_call_s: wall time of the first forward and backward, compilation included.
        errors_float64, errors_ours: relative L2, as "o 3.1e-03, dq 4.0e-03".
        bits: "equal" where every group gave the bits of the first eager call, else "differ".
        base_bits: the same against the revision that `--base` names, with launch records.
    """

    date: str
    commit: str
    device: str
    torch: str
    ranks: int
    suite: str
    order: str
    protocol: str
    row: str
    H: int
    HV: int
    tokens: int
    documents: int
    gates: str
    seed: int
    layout: str
    arm: str
    says: str
    version: str
    op: str
    mode: str
    groups_ms: tuple[float, ...]
    flops: int
    bytes: int
    floor_ms: float
    matmul_tflops: float
    copy_gbs: float
    peak_gib: float
    first_call_s: float
    errors_float64: str
    errors_ours: str
    bits: str
    base_bits: str
    note: str

    @property
    def ms(self) -> float | None:
        """Median of the groups."""
        return median(self.groups_ms) if self.groups_ms else None

    @property
    def unstable(self) -> bool:
        """Whether the groups' latencies differ by more than 1 %."""
        return bool(self.groups_ms) and spread(self.groups_ms) > UNSTABLE

    @property
    def share(self) -> float | None:
        """Fraction of the ceiling: least time by time."""
        return self.floor_ms / self.ms if self.ms and self.ms > 0 else None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """(row, arm, op, mode): one cell of any run."""
        return self.row, self.arm, self.op, self.mode


_DERIVED = ("ms", "spread", "unstable", "share_of_ceiling")
"""Columns for readers of the CSV; computed again when it is read."""


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ";".join(f"{x:.6g}" for x in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _parsed(kind: str, text: str) -> object:
    if kind.startswith("tuple"):
        return tuple(float(x) for x in text.split(";") if x)
    parse: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str}
    return parse[kind](text)


def write_csv(records: Iterable[Record], path: Path) -> None:
    """Writes a run; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(Record)]
    part = path.with_suffix(".part")
    with part.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow([*names, *_DERIVED])
        for record in records:
            ms, share = record.ms, record.share
            derived = [
                "" if ms is None else f"{ms:.6g}",
                f"{spread(record.groups_ms):.4f}" if record.groups_ms else "",
                "yes" if record.unstable else "",
                "" if share is None else f"{share:.4f}",
            ]
            table.writerow([*(_text(getattr(record, name)) for name in names), *derived])
    part.replace(path)


def read_csv(path: Path) -> list[Record]:
    """The records of a run.

    Raises:
        InvalidInput: the file is not a result of `longdelta bench`.
    """
    with path.open(newline="", encoding="utf-8") as stream:
        table = csv.DictReader(stream)
        missing = {field.name for field in fields(Record)} - set(table.fieldnames or ())
        if missing:
            raise InvalidInput(
                f"{path} is no result of longdelta bench: it lacks {', '.join(sorted(missing))}"
            )
        return [_record(line) for line in table]


def _record(line: dict[str, str]) -> Record:
    values: dict[str, Any] = {
        field.name: _parsed(str(field.type), line[field.name]) for field in fields(Record)
    }
    return Record(**values)


def read_folder(folder: Path) -> dict[str, list[Record]]:
    """Every run in a folder, by the stem of its file.

    Raises:
        InvalidInput: there is none.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise InvalidInput(f"{folder} holds no results (*.csv); longdelta bench --out makes them")
    return {path.stem: read_csv(path) for path in paths}


def measured(records: Iterable[Record]) -> bool:
    """Whether anything was timed."""
    return any(record.groups_ms for record in records)


def rows_of(records: Sequence[Record]) -> list[str]:
    """Names of the rows, in the order of the run."""
    return list(dict.fromkeys(record.row for record in records))


def arms_of(records: Sequence[Record]) -> list[str]:
    """Names of the arms, in the order of the run."""
    return list(dict.fromkeys(record.arm for record in records))
