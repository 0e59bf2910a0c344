"""The forward: prepare, then summarize and fold where documents are split, then scan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longdelta.kernels.stages import Backend, Tables
from longdelta.ops.activate import Activated, Activation, activate
from longdelta.ops.boundary import Boundary
from longdelta.ops.recompute import Record
from longdelta.ops.saved import Sizes
from longdelta.plan.tensors import FORWARD, KEPT, Counts


@dataclass(frozen=True)
class Operands:
    """One call, packed: q, k [T, H, K], v [T, HV, V], g, beta [T, HV]; states [., HV, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    activation: Activation
    scale: float

    def sizes(self, tables: Tables, backend: str) -> Sizes:
        _, HV, V = self.v.shape
        counts = Counts.of(tables.walk)
        return Sizes(counts, HV, self.k.shape[-1], V, self.q.dtype, backend)

    def activated(self, dtype: torch.dtype) -> Activated:
        return activate(
            self.q, self.k, self.g, self.beta, self.A_log, self.dt_bias, self.activation, dtype
        )


@dataclass(frozen=True)
class Machine:
    """What runs the stages: a backend, this rank's tables, and how states cross its borders."""

    name: str
    backend: Backend
    tables: Tables
    boundary: Boundary


def enter_borders(
    x: Activated, operands: Operands, machine: Machine, held: dict[str, Tensor]
) -> None:
    """Summaries of the segments, folded into the state at each border; every rank joins in."""
    if machine.tables.walk.borders:
        machine.backend.summarize(
            x.k,
            operands.v,
            x.beta,
            held["G"],
            held["Z"],
            operands.initial_state,
            machine.tables,
            S_border=held["S_border"],
            M=held["M"],
        )
    machine.boundary.enter(machine.backend, held["M"], machine.tables, S_border=held["S_border"])


def pass_empty_documents(
    walk_pairs: tuple[tuple[int, int], ...],
    source: Tensor | None,
    target: Tensor | None,
    adjoint: bool = False,
) -> None:
    """The state of a document without tokens passes through; so does its cotangent."""
    if target is None:
        return
    for start, end in walk_pairs:
        row, into = (end, start) if adjoint else (start, end)
        target[into] = 0 if source is None else source[row]


def forward(
    operands: Operands,
    machine: Machine,
    *,
    save: str,
    saved: Tensor,
    o: Tensor,
    final_state: Tensor | None,
    recompute: Record | None = None,
) -> None:
    """Writes o, final_state (where asked) and the saved set.

    recompute: keeps the states and maps at borders in a first run, and gives them in a second.
    """
    tables = machine.tables
    sizes = operands.sizes(tables, machine.name)
    x = operands.activated(sizes.compute_dtype)
    held = sizes.views(KEPT[save], saved)
    held |= sizes.new(tuple(name for name in FORWARD if name not in held), operands.q.device)
    machine.backend.prepare(x.k, x.g, x.beta, tables, G=held["G"], Z=held["Z"])
    if recompute is None:
        enter_borders(x, operands, machine, held)
    else:
        used = tables.walk.used_rows
        decisive = [y[:used] for y in (x.k, operands.v, x.g, x.beta)]

        def entered() -> tuple[Tensor, ...]:
            enter_borders(x, operands, machine, held)
            return held["S_border"], held["M"]

        plan = hash(tables.walk)
        kept = recompute.once(entered, plan, *decisive, operands.initial_state)
        held["S_border"].copy_(kept[0])
        held["M"].copy_(kept[1])
    machine.backend.scan(
        x.q,
        x.k,
        operands.v,
        x.beta,
        held["G"],
        held["Z"],
        held["S_border"],
        operands.initial_state,
        operands.scale,
        tables,
        o=o,
        final_state=final_state,
        S=held.get("S"),
        Uh=held.get("Uh"),
    )
    pass_empty_documents(tables.walk.empty, operands.initial_state, final_state)
