"""`longdelta bench`: this package and its peers in one run, and the tables and plots of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from longdelta.errors import InvalidInput

if TYPE_CHECKING:
    from longdelta.bench.problem import Place
    from longdelta.bench.results import Record
    from longdelta.bench.rows import Row
    from longdelta.bench.run import Options, Plan

RESULTS = Path("benchmarks/results")
"""Where results go in a checkout; elsewhere into `bench-results`."""
bench_app = typer.Typer(
    help="Time this package and its peers in one run, checked first.",
    invoke_without_command=True,
    add_completion=False,
)


SHORT = {"checkpointed": "ckpt"}
"""Titles of columns."""
LOOK: dict[str, Any] = {
    "title_justify": "left",
    "caption_justify": "left",
    "box": SIMPLE,
    "pad_edge": False,
    "collapse_padding": True,
}
"""Of the tables: narrow."""


def results_folder(suite: str = "") -> Path:
    """The default folder of results; those of the smoke suite are not for keeps."""
    return RESULTS if RESULTS.is_dir() and suite != "smoke" else Path("bench-results")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


@bench_app.callback()
def bench(
    context: typer.Context,
    suite: Annotated[str, typer.Option(help="seed, single, training, sweep or smoke.")] = "single",
    rows: Annotated[str, typer.Option(help="Rows of the suite: S26,DET; default: all.")] = "",
    arms: Annotated[
        str, typer.Option(help="ours,ours_fast,fla,flash_qla,...; default: all that fit the ranks.")
    ] = "",
    ops: Annotated[str, typer.Option(help="fwd,bwd,fwdbwd,checkpointed; default: all.")] = "",
    modes: Annotated[str, typer.Option(help="eager,replay; default: both, on a CPU eager.")] = "",
    base: Annotated[
        str | None,
        typer.Option(help="Git revision of this package, or a folder with it, as one more arm."),
    ] = None,
    reverse: Annotated[bool, typer.Option(help="The arms in reversed order.")] = False,
    quick: Annotated[bool, typer.Option(help="Fewer groups; slow calls less often.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; default: benchmarks/results where it is, but for smoke, "
            "else bench-results."
        ),
    ] = None,
    commit: Annotated[
        str, typer.Option(help="Named in the results, where the sources lie in no repository.")
    ] = "",
    minutes: Annotated[
        float | None, typer.Option(help="Begin no row later than this, above 0; default: run all.")
    ] = None,
) -> None:
    """Time this package and its peers in one run, each checked against float64 first."""
    if context.invoked_subcommand is not None:
        return
    from longdelta.bench.run import Options

    chosen = (_names(rows), _names(arms), _names(ops), _names(modes))
    folder = out or results_folder(suite)
    options = Options(suite, *chosen, base, reverse, quick, folder, commit, minutes)
    try:
        code = run_bench(options)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@bench_app.command("report")
def report(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder with CSV files of earlier runs; default: that of --out."),
    ] = None,
) -> None:
    """Rebuild the tables and plots of a folder from its CSV files."""
    from longdelta.bench.report import write_report

    try:
        typer.echo(f"wrote {write_report(folder or results_folder())}")
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None


def run_bench(options: Options, console: Console | None = None) -> int:
    """Run, show the tables, and write CSV, page and plots on the first rank.

    Returns:
        The exit code: 0; 1 where nothing was measured; 130 after an interrupt.
    """
    from longdelta.bench.run import place_here, plan_of
    from longdelta.distributed import collectives

    place = place_here()
    try:
        plan = plan_of(options, place)
        console = console or _console(place.rank > 0)
        return _run(plan, place, console)
    finally:
        collectives.leave(place.group)


def _console(quiet: bool) -> Console:
    """Wide enough for a line of the table where nobody looks at a screen."""
    found = Console(quiet=quiet)
    return found if found.is_terminal else Console(quiet=quiet, width=120)


def _run(plan: Plan, place: Place, console: Console) -> int:
    from longdelta.bench.report import write_report
    from longdelta.bench.results import measured
    from longdelta.bench.run import Run, device_name

    for arm in plan.arms:
        if arm.missing():
            console.print(f"{arm.name}: {arm.missing()}")
    console.print(f"{plan.suite.name} on {device_name(place)} x {place.ranks}: {plan.schedule}")
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    errors = Console(stderr=True, quiet=place.rank > 0)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("ceilings", total=plan.steps)
        begun: list[Row] = []

        def watch(row: Row, text: str, steps: int) -> None:
            bar.update(task, description=f"{row.name}: {text}", advance=steps)
            # Where no bar can be seen, a log says how far a run came.
            if row in begun:
                return
            begun.append(row)
            if not errors.is_terminal:
                at = f"{time.strftime('%H:%M:%S')} row {len(begun)} of {len(plan.rows)}"
                errors.print(f"{at}: {row}", soft_wrap=True, markup=False, highlight=False)

        run = Run(plan, place, watch=watch)
        records = run.all()
    if place.rank == 0:
        for mode in plan.modes:
            show(records, mode, console)
        if measured(records):
            wrote = f"wrote {plan.path} and {write_report(plan.path.parent)}"
        else:
            late = "" if begun or run.interrupted else f": no row began within {plan.minutes:g} min"
            wrote = f"Nothing was measured{late}; no results were written."
        console.print(wrote, soft_wrap=True, markup=False, highlight=False)
    return 130 if run.interrupted else 0 if measured(records) else 1


def show(records: list[Record], mode: str, console: Console) -> None:
    """What a person wants to see at once; everything else is in the CSV."""
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        if record.mode == mode and not record.note.startswith("not installed"):
            cells.setdefault((record.row, record.arm), {})[record.op] = record
    timed = {key: by_op for key, by_op in cells.items() if any(r.groups_ms for r in by_op.values())}
    if timed:
        console.print(_table(timed, mode))
        _print_base(records, mode, console)
    said: dict[str, list[str]] = {}
    for (row, arm), by_op in cells.items():
        for note in dict.fromkeys(record.note for record in by_op.values() if record.note):
            said.setdefault(note, []).append(f"{row} {arm}")
        if one := next((r for r in by_op.values() if r.base_bits and mode == "eager"), None):
            said.setdefault(f"against base: {one.base_bits}", []).append(row)
    for note, where in said.items():
        at = "" if len(where) == len(cells) else f", {', '.join(where)}"
        console.print(f"{mode}{at}: {note}", markup=False, highlight=False)


def _print_base(records: list[Record], mode: str, console: Console) -> None:
    """How many times faster than the revision of `--base` ours is, row by row."""
    from longdelta.bench.report import speed_up

    arms = {
        arm: {(r.row, r.op): r for r in records if (r.mode, r.arm) == (mode, arm)}
        for arm in ("ours", "base")
    }
    found = {key: speed_up(base, arms["ours"].get(key)) for key, base in arms["base"].items()}
    if not any(found.values()):
        return
    table = Table(title=f"{mode}, speed-up over base", **LOOK)
    table.add_column("row", no_wrap=True)
    ops = list(dict.fromkeys(op for _, op in found))
    for op in ops:
        table.add_column(SHORT.get(op, op), justify="right", no_wrap=True)
    for row in dict.fromkeys(row for row, _ in found):
        ratios = [found.get((row, op)) for op in ops]
        marked = [r and f"{r.middle:.3f}{'*' if r.unstable else ''}" for r in ratios]
        table.add_row(row, *(each or "-" for each in marked))
    console.print(table)


def _table(cells: dict[tuple[str, str], dict[str, Record]], mode: str) -> Table:
    ops = list(dict.fromkeys(op for by_op in cells.values() for op in by_op))
    table = Table(title=f"{mode}, ms (* UNSTABLE)", **LOOK)
    for name in ("row", "arm"):
        table.add_column(name, no_wrap=True)
    for name in (*ops, "ceiling", "GiB", "error", "bits"):
        table.add_column(SHORT.get(name, name), justify="right", no_wrap=True)
    before = ""
    for (row, arm), by_op in cells.items():
        if before and row != before:
            table.add_section()
        before = row
        one = by_op.get("fwdbwd") or next(iter(by_op.values()))
        errors = [float(part.split()[1]) for part in one.errors_float64.split(", ") if part]
        bits = {record.bits for record in by_op.values()} - {""}
        table.add_row(
            row,
            arm,
            *(_time(by_op[op]) for op in ops),
            "-" if one.share is None else f"{100 * one.share:.0f} %",
            f"{one.peak_gib:.2f}" if one.peak_gib else "-",
            f"{max(errors):.0e}" if errors else "-",
            "differ" if "differ" in bits else "".join(bits),
        )
    table.caption = "error: the largest against float64; bits: of every group against the first"
    return table


def _time(record: Record) -> str:
    return "-" if record.ms is None else f"{record.ms:.3f}{'*' if record.unstable else ''}"
