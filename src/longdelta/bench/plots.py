"""Pictures of a run: time against tokens, speed-up by row, share of the ceiling, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from longdelta.bench.results import Record, arms_of, rows_of
from longdelta.bench.timing import ratio

Axes = Any
Figure = Any
Value = Callable[[Record], "tuple[float, float, float] | None"]
"""(middle, low, high) of a record, or None where it has none."""

COLOURS = {
    "ours": "#0b559f",
    "ours_fast": "#57a0ce",
    "ours_heads": "#9ac8e0",
    "base": "#7f7f7f",
    "fla": "#e6862d",
    "fla_kcp": "#e6862d",
    "fla_heads": "#f4b880",
    "flash_qla": "#b2333c",
    "flash_qla_cp": "#b2333c",
    "flash_qla_heads": "#dd7d83",
    "flash_qla_one_gpu": "#6d1f26",
    "attn_gym": "#5a9e57",
}
OTHER = "#8d6bb0"
SHOWN = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"}


def draw_all(records: Sequence[Record], folder: Path, name: str) -> list[Path]:
    """Draws what a run has data for, as ``<name>-<mode>-<kind>.png``; returns the files."""
    timed = [record for record in records if record.groups_ms]
    kinds: dict[str, Callable[[Sequence[Record]], Figure | None]] = {
        "time-fwd": partial(draw_time, op="fwd"),
        "time-fwdbwd": partial(draw_time, op="fwdbwd"),
        "speedup": draw_speed_up,
        "ceiling": draw_ceiling,
    }
    figures = {
        f"{mode}-{kind}": draw([record for record in timed if record.mode == mode])
        for mode in dict.fromkeys(record.mode for record in timed)
        for kind, draw in kinds.items()
    }
    figures["memory"] = draw_memory(timed) if timed else None
    paths = []
    for kind, figure in figures.items():
        if figure is not None:
            paths.append(folder / f"{name}-{kind}.png")
            figure.savefig(paths[-1], dpi=150)
    return paths


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure as New

    return New(figsize=(width, height), layout="constrained")


def _plain(axes: Axes, grid: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color="#e4e4e4", lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _colour(arm: str) -> str:
    return COLOURS.get(arm, OTHER)


def _caption(figure: Figure, records: Sequence[Record], text: str) -> None:
    one = records[0]
    where = f"{one.device} x {one.ranks}, {one.mode}, commit {one.commit}, {one.date[:10]}"
    figure.supxlabel(f"{text}\n{where}", size=8, color="#444444")


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside upper left",
        ncols=min(len(found), max(2, int(figure.get_figwidth() / 1.9))),
        frameon=False,
        fontsize=9,
    )


def _tokens(value: float) -> str:
    count = round(value)
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def draw_time(records: Sequence[Record], op: str) -> Figure | None:
    """An operation against tokens, a panel for each (H, HV); rows of one document joined."""
    timed = [record for record in records if record.op == op]
    if not timed:
        return None
    heads = list(dict.fromkeys((r.H, r.HV) for r in timed))
    columns = min(4, len(heads))
    lines = -(-len(heads) // columns)
    figure = _figure(max(8.0, 3.1 * columns), 1.3 + 2.5 * lines)
    grid = figure.subplots(lines, columns, squeeze=False)
    panels = list(grid.flat)
    for panel in panels[len(heads) :]:
        panel.remove()
    for panel, pair in zip(panels, heads, strict=False):
        _time_panel(panel, [r for r in timed if pair == (r.H, r.HV)])
        panel.set_title(f"(H, HV) = ({pair[0]}, {pair[1]})", loc="left", size=10)
    for line in grid:
        line[0].set_ylabel("ms", size=9)
    _legend(figure, panels[: len(heads)])
    _caption(
        figure,
        timed,
        f"Time of {SHOWN[op]} against tokens. Filled: one document; open: several. "
        "Dashed: least time by the ceilings of the run.",
    )
    return figure


def _time_panel(axes: Axes, records: Sequence[Record]) -> None:
    for arm in arms_of(records):
        mine = sorted((r for r in records if r.arm == arm), key=lambda r: r.tokens)
        joined: dict[tuple[int, str], float] = {}
        for record in mine:
            if record.documents == 1:
                joined.setdefault((record.tokens, record.gates), record.ms or 0.0)
        above = 0 if arm == "base" else 2  # The A/A control does not hide what it equals.
        for gates in dict.fromkeys(gate for _, gate in joined):
            points = [(t, ms) for (t, gate), ms in joined.items() if gate == gates]
            axes.plot(*zip(*points, strict=True), color=_colour(arm), lw=1.2, zorder=2 + above)
        for record in mine:
            face = _colour(arm) if record.documents == 1 else "white"
            axes.plot(
                [record.tokens],
                [record.ms],
                marker="o",
                ms=4.5,
                color=_colour(arm),
                mfc=face,
                ls="none",
                zorder=3 + above,
            )
        axes.plot([], [], color=_colour(arm), marker="o", ms=4.5, lw=1.2, label=arm)
    least: dict[int, float] = {}
    for record in sorted(records, key=lambda r: r.tokens):
        least[record.tokens] = record.floor_ms
    mark = "_" if len(least) == 1 else None
    style = {"color": "#999999", "lw": 1, "ls": "--", "marker": mark, "label": "ceiling"}
    axes.plot(list(least), list(least.values()), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _tokens(value))
    _log_ticks(axes.yaxis, (1, 2, 5))
    axes.set_xlabel("tokens", size=9)
    _plain(axes, "both")


def draw_speed_up(records: Sequence[Record]) -> Figure | None:
    """How many times slower each other arm is than ours, by row and operation."""
    mine = {(r.row, r.op): r for r in records if r.arm == "ours"}

    def value(record: Record) -> tuple[float, float, float] | None:
        ours = mine.get((record.row, record.op))
        found = ratio(record.groups_ms, ours.groups_ms) if ours else None
        if found is None or found.low <= 0:
            return None
        return found.middle, found.low, found.high

    others = [r for r in records if r.arm != "ours"]
    figure = _by_row(others, value, log=True, mark=1.0)
    if figure is not None:
        text = "Time of each arm over ours (right of the line: ours is faster); bars: the groups."
        _caption(figure, records, text)
    return figure


def draw_ceiling(records: Sequence[Record]) -> Figure | None:
    """Least time by the ceilings of the run as a share of each time, in percent."""

    def value(record: Record) -> tuple[float, float, float] | None:
        share = record.share
        return None if share is None else (100 * share, 100 * share, 100 * share)

    figure = _by_row(records, value, log=False, mark=None)
    if figure is not None:
        _caption(figure, records, "Share of the ceiling in percent: least time over measured time.")
    return figure


def draw_memory(records: Sequence[Record]) -> Figure | None:
    """Peak memory of a forward and backward beyond the inputs, by row."""
    once = {(r.row, r.arm): r for r in records if r.op == "fwdbwd" and r.peak_gib > 0}

    def value(record: Record) -> tuple[float, float, float] | None:
        return record.peak_gib, record.peak_gib, record.peak_gib

    figure = _by_row(list(once.values()), value, log=True, mark=None)
    if figure is not None:
        text = "Peak memory of forward + backward beyond the inputs, GiB on the fullest rank."
        _caption(figure, records, text)
    return figure


def _by_row(
    records: Sequence[Record], value: Value, *, log: bool, mark: float | None
) -> Figure | None:
    """A panel for each operation: rows down the side, a dot for each arm."""
    found = [(r, v) for r in records if r.op in SHOWN and (v := value(r)) is not None]
    ops = [op for op in SHOWN if any(r.op == op for r, _ in found)]
    if not found:
        return None
    rows, arms = rows_of([r for r, _ in found]), arms_of([r for r, _ in found])
    figure = _figure(3.6 + 2.9 * len(ops), 1.6 + (0.2 + 0.025 * len(arms)) * len(rows))
    # Ratios of one operation say nothing of another's; shares and bytes are compared across.
    panels = figure.subplots(1, len(ops), sharex=mark is None, sharey=True, squeeze=False)[0]
    ends = [end for _, value_ends in found for end in value_ends]
    log = log and max(ends) > 1.6 * min(ends)
    for panel, op in zip(panels, ops, strict=True):
        if mark is not None:
            panel.axvline(mark, color="#333333", lw=1, zorder=1)
        for arm in arms:
            offset = 0.5 * (arms.index(arm) - (len(arms) - 1) / 2) / max(1, len(arms))
            points = [
                (rows.index(r.row) + offset, v) for r, v in found if (r.op, r.arm) == (op, arm)
            ]
            for y, (_, low, high) in points:
                panel.plot([low, high], [y, y], color=_colour(arm), lw=2.4, alpha=0.5)
            panel.plot(
                [v[0] for _, v in points],
                [y for y, _ in points],
                ls="none",
                marker="o",
                ms=5,
                color=_colour(arm),
                label=arm,
            )
        panel.set_title(SHOWN[op], loc="left", size=10)
        _row_axes(panel, rows, log, narrow=max(ends) < 10 * min(ends))
    if not log and mark is None:
        panels[0].set_xlim(0, 1.05 * max(ends))
    _legend(figure, panels)
    return figure


def _log_ticks(axis: Any, steps: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _row_axes(panel: Axes, rows: Sequence[str], log: bool, *, narrow: bool) -> None:
    panel.set_yticks(range(len(rows)), rows)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    if log:
        panel.set_xscale("log")
        _log_ticks(panel.xaxis, (1, 1.5, 2, 3, 5, 7) if narrow else (1, 2, 5))
    for edge in range(1, len(rows)):
        panel.axhline(edge - 0.5, color="#efefef", lw=0.8, zorder=0)
    _plain(panel, "x")
    panel.tick_params(axis="y", length=0)
