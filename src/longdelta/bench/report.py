"""Tables in Markdown from the results of a folder, and the plots beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from longdelta.bench.plots import draw_all
from longdelta.bench.results import TITLES, Record, read_folder, rows_of
from longdelta.bench.timing import Ratio, ratio

OWN = ("ours", "ours_fast", "ours_heads", "base")
"""Arms that are this package; the others are peers."""
NAME = "report.md"


class Written(NamedTuple):
    """The page and the plots of a folder."""

    page: Path
    plots: tuple[Path, ...]

    def __str__(self) -> str:
        count = len(self.plots)
        return f"{self.page} with {count} plot{'s' * (count != 1)}"


def write_report(folder: Path) -> Written:
    """Rebuilds ``report.md`` and the plots of a folder from its CSV files.

    Raises:
        InvalidInput: the folder holds no results.
    """
    runs = read_folder(folder)
    parts = [
        "# Benchmark results",
        "Made by `longdelta bench report` from the CSV files of this folder. The protocol, and "
        "what each column means, is in docs/design/benchmark.md. Times in ms; speed-up = median of "
        "the per-group ratios [least, greatest]; UNSTABLE: the groups differ by more than 1 %.",
    ]
    plots: list[Path] = []
    for name, records in runs.items():
        pictures = draw_all(records, folder, name)
        plots += pictures
        parts += [run_section(name, records), *(f"![{p.stem}]({p.name})" for p in pictures)]
    parts += [moved_section(a, runs[a], b, runs[b]) for a, b in reversed_pairs(runs)]
    page = folder / NAME
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return Written(page, tuple(plots))


def run_section(name: str, records: Sequence[Record]) -> str:
    """Heading and tables of one run."""
    if not records:
        return f"## {name}\n\nNothing was measured."
    one = records[0]
    facts = (
        f"{one.device} x {one.ranks}, torch {one.torch}, commit {one.commit}, {one.date} UTC. "
        f"Arms {one.order}; {one.protocol} iterations. Ceilings of this run: matrix product "
        f"{one.matmul_tflops:.4g} TFLOP/s, copy {one.copy_gbs:.4g} GB/s."
    )
    return "\n\n".join(
        [
            f"## {name}",
            facts,
            seed_table(records),
            "Every arm:",
            arm_table(records),
            "The rows:",
            row_table(records),
        ]
    )


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(_safe(cell) for cell in row) + " |" for row in rows)


def _safe(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ") or "-"


def _ms(record: Record | None) -> str:
    if record is None or record.ms is None:
        return "-"
    return f"{record.ms:.3f}" + (" UNSTABLE" if record.unstable else "")


def speed_up(over: Record | None, record: Record | None) -> Ratio | None:
    """How much faster `record` is than `over`, group by group."""
    if over is None or record is None:
        return None
    return ratio(over.groups_ms, record.groups_ms)


def _cells(records: Sequence[Record]) -> Iterator[tuple[str, str, str, dict[str, Record]]]:
    """(row, mode, op, records by arm), in the order of the run."""
    found: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in records:
        found.setdefault((record.row, record.mode, record.op), {})[record.arm] = record
    for (row, mode, op), arms in found.items():
        yield row, mode, op, arms


def strongest_peer(arms: dict[str, Record]) -> Record | None:
    """The fastest arm that is not this package."""
    peers = [r for name, r in arms.items() if name not in OWN and r.ms is not None]
    return min(peers, key=lambda r: r.ms or 0.0) if peers else None


def workload(record: Record) -> str:
    """Row, heads, tokens, ranks, layout, mode and run in one cell, as the seed's table has it."""
    cp = f", CP{record.ranks}, {record.layout}" if record.ranks > 1 else ""
    run = "run 2 (reversed arm order)" if record.order == "reversed" else "run 1"
    return f"{record.row}, ({record.H}, {record.HV}), {record.tokens}{cp}; {record.mode}; {run}"


def seed_table(records: Sequence[Record]) -> str:
    """The seed's columns: ours, the fast mode, the previous version, the strongest other."""
    lines = []
    for _, mode, op, arms in _cells(records):
        ours, fast, base = (arms.get(name) for name in ("ours", "ours_fast", "base"))
        peer = strongest_peer(arms)
        if not any(record.ms is not None for record in arms.values()):
            continue
        none = f"n/a (no {mode} arm)"
        other = none if peer is None else f"{_ms(peer)} ({peer.says})"
        ratios = [speed_up(a, b) for a, b in ((peer, ours), (base, ours), (ours, fast))]
        lines.append(
            [
                workload(next(iter(arms.values()))),
                TITLES[op],
                _ms(ours),
                _ms(fast),
                _ms(base),
                other,
                *("n/a" if each is None else str(each) for each in ratios),
            ]
        )
    return _table(
        [
            "workload; mode; run",
            "operation",
            "ours (deterministic) ms",
            "ours (fast) ms",
            "previous ms",
            "strongest other ms",
            "speed-up over strongest other",
            "speed-up over previous",
            "fast over deterministic",
        ],
        lines,
    )


def arm_table(records: Sequence[Record]) -> str:
    """A line for each row, mode and arm: times, share of the ceiling, memory, errors, notes."""
    ops = list(dict.fromkeys(record.op for record in records))
    found: dict[tuple[str, str], dict[str, dict[str, Record]]] = {}
    for record in records:
        modes = found.setdefault((record.row, record.arm), {})
        modes.setdefault(record.mode, {})[record.op] = record
    lines = []
    for (row, arm), modes in found.items():
        timed = {mode: each for mode, each in modes.items() if any(_timed(each))}
        shown = timed or dict(list(modes.items())[:1])
        silent = [each for mode, each in modes.items() if mode not in shown]
        for place, (mode, by_op) in enumerate(shown.items()):
            notes = _notes([by_op, *silent] if place == 0 else [by_op])
            lines.append([row, mode, *_arm_line(arm, by_op, ops), notes])
    heads = ["row", "mode", "arm", *(f"{op} ms" for op in ops), "of ceiling", "peak GiB"]
    heads += ["first call s", "errors, float64", "errors, ours", "bits repeat", "note"]
    return _table(heads, lines)


def _timed(by_op: dict[str, Record]) -> list[bool]:
    return [bool(record.groups_ms) for record in by_op.values()]


def _notes(groups: Sequence[dict[str, Record]]) -> str:
    """What is said of an arm, each once: of its mode, then of modes that were not timed."""
    own = list(dict.fromkeys(record.note for record in groups[0].values() if record.note))
    for by_op in groups[1:]:
        notes = dict.fromkeys(record.note for record in by_op.values() if record.note)
        own += [f"{next(iter(by_op.values())).mode}: {note}" for note in notes if note not in own]
    base = next(iter(groups[0].values())).base_bits
    return "; ".join([*own, *([f"against base: {base}"] if base else [])])


def _arm_line(arm: str, by_op: dict[str, Record], ops: Sequence[str]) -> list[str]:
    last = by_op.get("fwdbwd") or next(iter(by_op.values()))
    bits = {record.bits for record in by_op.values()} - {""}
    return [
        f"{arm} {last.version}".strip(),
        *(_ms(by_op.get(op)) for op in ops),
        "" if last.share is None else f"{100 * last.share:.0f} %",
        f"{last.peak_gib:.2f}" if last.peak_gib else "",
        f"{last.first_call_s:.1f}" if last.first_call_s else "",
        _worst(last.errors_float64),
        _worst(last.errors_ours),
        "differ" if "differ" in bits else "".join(bits),
    ]


def _worst(errors: str) -> str:
    """The error of o, and the largest of all; the CSV has every one."""
    parts = errors.split(", ")
    worst = max(parts, key=lambda part: float(part.split()[1])) if errors else ""
    return worst if worst == parts[0] else f"{parts[0]}; {worst}"


def row_table(records: Sequence[Record]) -> str:
    """What the rows are, and the least work of a forward and backward."""
    lines = []
    for name in rows_of(records):
        mine = [record for record in records if record.row == name]
        one = next((record for record in mine if record.op == "fwdbwd"), mine[0])
        lines.append(
            [
                name,
                f"({one.H}, {one.HV})",
                f"{one.tokens:,}",
                f"{one.documents:,}",
                one.gates,
                str(one.seed),
                one.layout,
                one.op,
                f"{one.flops / 1e9:.4g}",
                f"{one.bytes / 1e6:.4g}",
                f"{one.floor_ms:.4f}",
            ]
        )
    heads = ["row", "(H, HV)", "tokens", "documents", "gates", "seed", "layout", "work of"]
    return _table([*heads, "GFLOP", "MB", "least ms by the ceilings"], lines)


def reversed_pairs(runs: dict[str, list[Record]]) -> list[tuple[str, str]]:
    """Runs of the same suite, device and commit in both orders: (as given, reversed) names."""
    kinds: dict[tuple[object, ...], dict[str, str]] = {}
    for name, records in runs.items():
        if records:
            one = records[0]
            same = (one.suite, one.device, one.ranks, one.commit, one.protocol)
            kinds.setdefault(same, {})[one.order] = name
    return [(each["as given"], each["reversed"]) for each in kinds.values() if len(each) == 2]


def moved_section(name: str, first: Sequence[Record], other: str, second: Sequence[Record]) -> str:
    """Two runs in separate processes: how many cells are UNSTABLE, how far medians moved."""
    again = {record.key: record for record in second}
    lines, said = [], []
    for mode in dict.fromkeys(record.mode for record in first):
        for run, records in ((name, first), (other, second)):
            timed = [r for r in records if r.groups_ms and r.mode == mode]
            lines.append([run, mode, f"{len(timed)}", _share([r.unstable for r in timed])])
        moves = _moves([r for r in first if r.mode == mode], again)
        if moves:
            worst, record = moves[-1]
            said.append(
                f"{mode}: medians of {len(moves)} cells moved by "
                f"{100 * median(m for m, _ in moves):.2f} % in the middle and {100 * worst:.2f} % "
                f"at most ({' '.join(record.key)})."
            )
    table = _table(["run", "mode", "timed cells", "UNSTABLE"], lines)
    text = "\n\n".join(said or ["No cell was measured in both."])
    return f"## {name} and its reversed run\n\n{table}\n\n{text}"


def _share(flags: Sequence[bool]) -> str:
    return f"{sum(flags)} ({100 * sum(flags) / max(1, len(flags)):.0f} %)"


def _moves(
    first: Sequence[Record], again: dict[tuple[str, str, str, str], Record]
) -> list[tuple[float, Record]]:
    found = []
    for record in first:
        twin = again.get(record.key)
        if record.ms and twin is not None and twin.ms:
            found.append((abs(twin.ms / record.ms - 1), record))
    return sorted(found, key=lambda each: each[0])
