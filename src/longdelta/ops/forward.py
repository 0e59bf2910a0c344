"""The forward: activate, prepare, then summarize and fold where documents are split, then scan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longdelta.kernels.stages import Activation, Backend, Tables
from longdelta.ops.boundary import Boundary
from longdelta.ops.recompute import Record
from longdelta.ops.saved import Sizes
from longdelta.plan.tensors import ACTIVATED, FORWARD, KEPT


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
        (T, H, K), (_, HV, V) = self.k.shape, self.v.shape
        return Sizes(tables.counts, HV, K, V, self.q.dtype, backend, T, H)

    def activated(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Names of ACTIVATED that this call has to make; the stages take the rest in place."""
        raw = self.activation
        units = ("q_unit", "k_unit") if raw.qk_l2norm else ()
        gates = (("g", self.g, raw.gate), ("beta", self.beta, raw.beta_sigmoid))
        return units + tuple(
            name for name, x, is_raw in gates if is_raw or x.dtype != dtype or not x.is_contiguous()
        )


@dataclass(frozen=True)
class Activated:
    """q, k, g, beta as the rule takes them."""

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True)
class Machine:
    """What runs the stages: a backend, this rank's tables, and how states cross its borders."""

    name: str
    backend: Backend
    tables: Tables
    boundary: Boundary


def activate(operands: Operands, machine: Machine, held: dict[str, Tensor]) -> Activated:
    """The inputs as they came, but for those that `held` has a place for."""
    x = operands
    made = {name: held.get(name) for name in ACTIVATED}
    if any(place is not None for place in made.values()):
        machine.backend.activate(
            x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, x.activation, machine.tables, **made
        )
    given = zip((x.q, x.k, x.g, x.beta), made.values(), strict=True)
    return Activated(*(raw if place is None else place for raw, place in given))


def prepare(x: Activated, machine: Machine, held: dict[str, Tensor]) -> None:
    """What every chunk needs that no state enters."""
    made = {name: held[name] for name in ("G", "Z", "bound")}
    machine.backend.prepare(x.k, x.g, x.beta, machine.tables, **made)


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
            held["bound"],
            operands.initial_state,
            machine.tables,
            S_border=held["S_border"],
            M=held["M"],
            M_bound=held["M_bound"],
        )
    machine.boundary.enter(
        machine.backend, held["M"], held["M_bound"], machine.tables, S_border=held["S_border"]
    )


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
    held = sizes.views(KEPT[save], saved)
    names = operands.activated(sizes.compute_dtype) + FORWARD
    held |= sizes.new(tuple(name for name in names if name not in held), operands.q.device)
    x = activate(operands, machine, held)
    prepare(x, machine, held)
    if recompute is None:
        enter_borders(x, operands, machine, held)
    else:
        used = tables.walk.used_rows
        decisive = [y[:used] for y in (x.k, operands.v, x.g, x.beta)]

        def entered() -> tuple[Tensor, ...]:
            enter_borders(x, operands, machine, held)
            return tuple(held[name] for name in KEPT["light"])

        plan = hash(tables.walk)
        kept = recompute.once(entered, plan, *decisive, operands.initial_state)
        for name, entry in zip(KEPT["light"], kept, strict=True):
            held[name].copy_(entry)
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
