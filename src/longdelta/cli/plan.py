"""`longdelta plan`: who holds which tokens, which states cross, and how many bytes that takes."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from longdelta.cli.options import check_layout, check_picture, document_lengths, two_heads
from longdelta.cli.picture import Layer, counted, crossing_offsets, draw_plan, needs, size
from longdelta.errors import InvalidInput
from longdelta.plan.chains import relay_rounds
from longdelta.plan.checks import check_choice
from longdelta.plan.cost import BACKENDS, Bytes, rank_counts, rank_segments
from longdelta.plan.partition import Partition, partition
from longdelta.plan.tensors import SAVE_MODES

SHOWN = 24
"""Crossings, and fragments of a rank, that are printed before the rest is counted."""
MOST_RANKS = 512
MOST_PIECES = 2**16
"""Documents times ranks, in the layout that cuts each document for every rank."""


def plan_command(
    lengths: Annotated[str, typer.Option(help="Tokens of each document: 2049,3001 or 64x4096.")],
    ranks: Annotated[
        int, typer.Option(min=1, max=MOST_RANKS, help="Devices that share the batch.")
    ] = 2,
    layout: Annotated[
        str, typer.Option(help="contiguous, zigzag, zigzag_per_document or balanced.")
    ] = "contiguous",
    align: Annotated[
        str, typer.Option(help="token: cut anywhere. segment: the bits of one device.")
    ] = "token",
    heads: Annotated[
        str, typer.Option(help="q/k heads and value heads, of 128 columns.")
    ] = "16,48",
    save: Annotated[str, typer.Option(help="none, light or full.")] = "light",
    backend: Annotated[str, typer.Option(help="Whose bytes: eager, or gluon on Hopper.")] = "eager",
    draw: Annotated[Path | None, typer.Option(help="Save a picture of the plan as a PNG.")] = None,
) -> None:
    """Print who holds which tokens, which states cross between ranks, and the bytes."""
    try:
        tokens = document_lengths(lengths)
        H, HV = two_heads(heads)
        check_layout(layout)
        check_choice("save", save, SAVE_MODES)
        check_choice("backend", backend, BACKENDS)
        if draw is not None:
            check_picture("draw", draw)
        if layout == "zigzag_per_document" and len(tokens) * ranks > MOST_PIECES:
            raise InvalidInput(
                f"lengths must be at most {MOST_PIECES // ranks:,} documents for {ranks} ranks of "
                f"zigzag_per_document, got {len(tokens):,}; use fewer, or another layout"
            )
        plan = partition([0, *accumulate(tokens)], ranks, layout, align=align, num_v_heads=HV)
        layer = Layer(H, HV, save, backend)
        print_plan(plan, layer)
        if draw is not None:
            draw_plan(plan, layer, draw)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None


def print_plan(plan: Partition, layer: Layer, console: Console | None = None) -> None:
    """Print the tables of a partition for such layers."""
    console = console or Console()
    console.print(_held_table(plan, layer.HV))
    if any(relay_rounds(plan)):
        console.print(_crossing_table(plan))
    elif plan.ranks > 1:
        console.print("0 crossings: no state is sent between ranks.")
    console.print(_bytes_table(plan, layer))
    console.print(_verdict(plan, layer.HV))


def _held_table(plan: Partition, HV: int) -> Table:
    table = Table(
        title=f"{plan.layout}, align={plan.align}: {counted(plan.documents, 'document')}, "
        f"{counted(plan.cu_seqlens[-1], 'token')} on {counted(plan.ranks, 'rank')}",
        title_justify="left",
    )
    for name in ("rank", "tokens", "chunks", "segments"):
        table.add_column(name, justify="right")
    table.add_column("holds document[from:to)")
    for rank, pieces in enumerate(plan.fragments):
        held = [
            f"{piece.document}\\[{piece.offset}:{piece.stop})"
            if piece.length < plan.document_tokens(piece.document)
            else f"{piece.document}"
            for piece in pieces[:SHOWN]
        ]
        more = f" and {len(pieces) - SHOWN} more" if len(pieces) > SHOWN else ""
        segments = sum(count for _, count in rank_segments(plan, rank, HV))
        table.add_row(
            str(rank),
            f"{plan.tokens(rank):,}",
            f"{rank_counts(plan, rank, HV).chunks:,}",
            f"{segments:,}",
            ", ".join(held) + more or "-",
        )
    return table


def _crossing_table(plan: Partition) -> Table:
    forward, backward = relay_rounds(plan), relay_rounds(plan, backward=True)
    table = Table(
        title=f"{counted(sum(map(len, forward)), 'crossing')}, "
        f"{counted(len(forward), 'relay round')} each way",
        title_justify="left",
    )
    for name in ("document", "after token", "from rank", "to rank", "round", "round back"):
        table.add_column(name, justify="right")
    round_back = {
        (hop.document, hop.position): step for step, hops in enumerate(backward) for hop in hops
    }
    rounds = [(step, hop) for step, hops in enumerate(forward) for hop in hops]
    offsets = crossing_offsets(plan)
    for step, hop in rounds[:SHOWN]:
        key = (hop.document, hop.position)
        table.add_row(
            str(hop.document),
            f"{offsets[key]:,}",
            str(hop.source),
            str(hop.target),
            str(step),
            str(round_back[key]),
        )
    if len(rounds) > SHOWN:
        table.caption = f"and {len(rounds) - SHOWN} more"
    return table


def _bytes_table(plan: Partition, layer: Layer) -> Table:
    table = Table(
        title=f"bytes of one layer, (H, HV) = ({layer.H}, {layer.HV}), bfloat16, "
        f"save={layer.save}, {layer.backend} backend",
        title_justify="left",
    )
    for name in ("rank", "saved", "workspace\nforward", "workspace\nbackward"):
        table.add_column(name, justify="right")
    for name in ("relay\nout, in", "summaries\nout, in", "conv halo\nout, in"):
        table.add_column(name, justify="right")
    for rank in range(plan.ranks):
        relay, fast = needs(plan, layer, rank, True), needs(plan, layer, rank, False)
        table.add_row(
            str(rank),
            size(relay.saved),
            size(relay.workspace_forward),
            size(relay.workspace_backward),
            _out_in(relay, "relay"),
            "as relay" if relay == fast and relay.collectives else _out_in(fast, "summaries"),
            _out_in(relay, "halo"),
        )
    table.caption = "out, in: sent and received by a forward; relay: deterministic, summaries: not"
    return table


def _out_in(needed: Bytes, name: str) -> str:
    found = [
        each for each in needed.collectives if (each.name, each.direction) == (name, "forward")
    ]
    if not found:
        return "-"
    out, into = sum(each.sent for each in found), sum(each.received for each in found)
    return f"{size(out)}\n{size(into)}"


def _verdict(plan: Partition, HV: int) -> str:
    if plan.keeps_contract(HV):
        return "Every cut is on a segment border: the bits are those of one device."
    return (
        "A cut is off the segment borders: the bits repeat on this partition, but differ from one "
        "device's. Use --align segment to keep them."
    )
