"""The picture of a plan: ranks as rows, documents as colours, crossings as arrows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longdelta.plan.chains import crossings, relay_rounds
from longdelta.plan.cost import Bytes, rank_bytes
from longdelta.plan.flops import Heads
from longdelta.plan.partition import Partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARROWS = 500
"""Crossings that are drawn; more would hide each other."""
COLOURS = (
    "#8fb8de", "#f4b183", "#a9d18e", "#e39aa4", "#c3a6d8",
    "#d9c27e", "#7fcdbb", "#f2a6c9", "#b9b9b9", "#9fd0e6",
)  # fmt: skip
"""Of the documents in turn; light, so that black figures can be read on them."""


@dataclass(frozen=True)
class Layer:
    """Whose bytes are told: a bfloat16 layer of 128 columns a head, and what runs it."""

    H: int
    HV: int
    save: str = "light"
    backend: str = "eager"


def draw_plan(plan: Partition, layer: Layer, path: Path) -> None:
    """Save a picture: ranks as rows, documents as colours, crossings as arrows, bytes below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.9 + min(0.55 * (plan.ranks + 1), 16)
    figure = Figure(figsize=(11, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_rows(axes, plan)
    _draw_arrows(axes, plan)
    _label(figure, axes, plan, layer)
    figure.savefig(path, dpi=150)


def needs(plan: Partition, layer: Layer, rank: int, deterministic: bool) -> Bytes:
    """Bytes of one rank, with a convolution of 4 rows."""
    return rank_bytes(
        plan,
        rank,
        Heads(layer.H, layer.HV),
        save=layer.save,
        backend=layer.backend,
        deterministic=deterministic,
        conv1d_kernel_size=4,
    )


def size(count: int) -> str:
    """Bytes for a reader.

    >>> size(0), size(1536), size(3 << 20)
    ('0 B', '1.5 KiB', '3.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.2f} GiB"


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "round"), counted(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def crossing_offsets(plan: Partition) -> dict[tuple[int, int], int]:
    """Token offset in its document of each (document, position)."""
    cuts = sorted(
        (piece.document, piece.offset)
        for pieces in plan.fragments
        for piece in pieces
        if piece.offset
    )
    found: dict[tuple[int, int], int] = {}
    position = before = -1
    for document, offset in cuts:
        position = position + 1 if document == before else 0
        found[document, position] = offset
        before = document
    return found


def _draw_rows(axes: Axes, plan: Partition) -> None:
    total = max(plan.cu_seqlens[-1], 1)
    whole = [(document, 0, plan.document_tokens(document)) for document in range(plan.documents)]
    rows = [(-1, whole)]
    for rank, pieces in enumerate(plan.fragments):
        rows.append((rank, [(piece.document, piece.offset, piece.length) for piece in pieces]))
        axes.barh(rank, total, height=0.62, color="#f3f3f3", edgecolor="none", zorder=1)
    for row, strips in rows:
        filled = [
            (d, plan.cu_seqlens[d] + offset, length) for d, offset, length in strips if length
        ]
        axes.broken_barh(
            [(start, length) for _, start, length in filled],
            (row - 0.31, 0.62),
            facecolors=[COLOURS[document % len(COLOURS)] for document, _, _ in filled],
            edgecolors="white",
            linewidths=[0.8 if length > total * 0.01 else 0.0 for _, _, length in filled],
            zorder=2,
        )
        for document, start, length in filled:
            if length > total * 0.045:
                text = f"{document}" if row < 0 else f"{length:,}"
                middle = start + length / 2
                axes.text(middle, row, text, ha="center", va="center", size=8, zorder=4)


def _draw_arrows(axes: Axes, plan: Partition) -> None:
    offsets = crossing_offsets(plan)
    for hop in crossings(plan)[:ARROWS]:
        at = plan.cu_seqlens[hop.document] + offsets[hop.document, hop.position]
        down = 1 if hop.target > hop.source else -1
        axes.annotate(
            "",
            xy=(at, hop.target - 0.31 * down),
            xytext=(at, hop.source + 0.31 * down),
            arrowprops={
                "arrowstyle": "-|>",
                "color": "black",
                "lw": 1.2,
                "shrinkA": 0,
                "shrinkB": 0,
            },
            zorder=5,
        )


def _label(figure: Figure, axes: Axes, plan: Partition, layer: Layer) -> None:
    axes.set_xlim(0, max(plan.cu_seqlens[-1], 1))
    axes.set_ylim(plan.ranks - 0.5, -1.5)
    axes.set_yticks(
        [-1, *range(plan.ranks)],
        ["documents", *(f"rank {rank}\n{plan.tokens(rank):,}" for rank in range(plan.ranks))],
    )
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("token of the packed batch", size=9)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    relay = [needs(plan, layer, rank, True) for rank in range(plan.ranks)]
    fast = [needs(plan, layer, rank, False) for rank in range(plan.ranks)]
    crossed = len(crossings(plan))
    drawn = f" (the first {ARROWS} drawn)" if crossed > ARROWS else ""
    axes.set_title(
        f"{plan.layout} on {counted(plan.ranks, 'rank')}, align={plan.align}: "
        f"{counted(crossed, 'crossing')}{drawn}, {counted(len(relay_rounds(plan)), 'relay round')}",
        loc="left",
        size=11,
    )
    sent = [sum(needed.sent("forward") for needed in each) for each in (relay, fast)]
    figure.supxlabel(
        f"Sent by all ranks in one forward of a layer, (H, HV) = ({layer.H}, {layer.HV}): "
        f"{size(sent[0])} by the relay, {size(sent[1])} by summaries, conv halo included. "
        f"Saved per rank ({layer.save}, {layer.backend}): up to "
        f"{size(max(needed.saved for needed in relay))}.",
        size=8,
        color="#444444",
    )
