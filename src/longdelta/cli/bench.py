"""`longdelta bench`: this package and its peers in one run, and the tables and plots of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from longdelta.errors import InvalidInput

if TYPE_CHECKING:
    from longdelta.bench.problem import Place
    from longdelta.bench.results import Record
    from longdelta.bench.run import Options, Plan

RESULTS = Path("benchmarks/results")
bench_app = typer.Typer(
    help="Time this package and its peers in one run, checked first.",
    invoke_without_command=True,
    add_completion=False,
)


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
    modes: Annotated[str, typer.Option(help="eager,replay; default: both.")] = "",
    base: Annotated[
        str | None,
        typer.Option(help="Git revision of this package, or a folder with it, as one more arm."),
    ] = None,
    reverse: Annotated[bool, typer.Option(help="The arms in reversed order.")] = False,
    quick: Annotated[bool, typer.Option(help="Fewer groups; slow calls less often.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    commit: Annotated[
        str, typer.Option(help="Named in the results, where the sources lie in no repository.")
    ] = "",
    minutes: Annotated[
        float | None, typer.Option(help="Begin no row later than this; default: run all.")
    ] = None,
) -> None:
    """Time this package and its peers in one run, each checked against float64 first."""
    if context.invoked_subcommand is not None:
        return
    from longdelta.bench.run import Options

    chosen = (_names(rows), _names(arms), _names(ops), _names(modes))
    options = Options(suite, *chosen, base, reverse, quick, out, commit, minutes)
    try:
        run_bench(options)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None


@bench_app.command("report")
def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder with CSV files of earlier runs.")
    ] = RESULTS,
) -> None:
    """Rebuild the tables and plots of a folder from its CSV files."""
    from longdelta.bench.report import write_report

    try:
        Console().print(f"wrote {write_report(folder)}")
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None


def run_bench(options: Options, console: Console | None = None) -> list[Record]:
    """Run, show each row as it is done, and write CSV, tables and plots on the first rank."""
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


def _run(plan: Plan, place: Place, console: Console) -> list[Record]:
    from longdelta.bench.report import write_report
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
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("ceilings", total=plan.steps)

        said = ""

        def watch(text: str, steps: int) -> None:
            nonlocal said
            bar.update(task, description=text, advance=steps)
            # Where no bar can be seen, a log says how far a run came.
            if not console.is_terminal and text != said and place.rank == 0:
                typer.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)
            said = text

        records = Run(plan, place, watch=watch).all()
    if place.rank == 0:
        for mode in plan.modes:
            _show(records, mode, console)
        console.print(f"wrote {plan.path} and {write_report(plan.path.parent)}")
    return records


def _show(records: list[Record], mode: str, console: Console) -> None:
    """What a person wants to see at once; everything else is in the CSV."""
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        if record.mode == mode and not record.note.startswith("not installed"):
            cells.setdefault((record.row, record.arm), {})[record.op] = record
    timed = {key: by_op for key, by_op in cells.items() if any(r.groups_ms for r in by_op.values())}
    if timed:
        console.print(_table(timed, mode))
    said: dict[str, list[str]] = {}
    for (row, arm), by_op in cells.items():
        for note in dict.fromkeys(record.note for record in by_op.values() if record.note):
            said.setdefault(note, []).append(f"{row} {arm}")
        if one := next((r for r in by_op.values() if r.base_bits and mode == "eager"), None):
            said.setdefault(f"against base: {one.base_bits}", []).append(row)
    for note, where in said.items():
        at = "" if len(where) == len(cells) else f", {', '.join(where)}"
        console.print(f"{mode}{at}: {note}", markup=False, highlight=False)


def _table(cells: dict[tuple[str, str], dict[str, Record]], mode: str) -> Table:
    ops = list(dict.fromkeys(op for by_op in cells.values() for op in by_op))
    table = Table(title=f"{mode}, ms (* UNSTABLE)", title_justify="left", box=SIMPLE)
    for name in ("row", "arm"):
        table.add_column(name, no_wrap=True)
    for name in (*ops, "ceiling", "GiB", "error", "bits"):
        title = {"checkpointed": "ckpt"}.get(name, name)
        table.add_column(title, justify="right", no_wrap=True)
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
