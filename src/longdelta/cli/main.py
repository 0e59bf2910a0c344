"""The commands; each imports what it runs when it runs, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdelta import __version__
from longdelta.cli.bench import bench_app
from longdelta.cli.plan import plan_command
from longdelta.errors import InvalidInput

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
)
app.command("plan")(plan_command)
app.add_typer(bench_app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"longdelta {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Training kernels for Gated DeltaNet layers over packed documents."""


@app.command()
def demo(
    text: Annotated[
        Path | None,
        typer.Option(help="File to learn, read as bytes; default: this project's documentation."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the model, the batches and the sample.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<index>.")] = "auto",
    threads: Annotated[
        int, typer.Option(min=0, help="Of torch on the CPU; 0: one, the safe choice.")
    ] = 0,
    plot: Annotated[Path | None, typer.Option(help="Save the loss curve as a PNG.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that share each step; default: 2 with 4 cores or GPUs."
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Of the tokens on the processes: contiguous, zigzag, ...")
    ] = "zigzag",
    align: Annotated[
        str, typer.Option(help="Where documents are cut: token (anywhere) or segment.")
    ] = "token",
) -> None:
    """Train a small byte-level language model, sample from it and check its gradients."""
    from longdelta.cli.demo import DemoOptions, run_demo

    try:
        result = run_demo(
            DemoOptions(text, steps, seed, device, threads, plot, ranks, layout, align)
        )
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def doctor(
    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile the Hopper kernels and report on each; needs no GPU."
        ),
    ] = False,
) -> None:
    """Say which versions and devices are here, which backend runs, and why not the others."""
    from longdelta.cli.doctor import run_compile, run_doctor

    if compile:
        raise typer.Exit(0 if run_compile() else 1)
    run_doctor()
