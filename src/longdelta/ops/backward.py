"""The backward: the forward's stages that were not saved, then adjoint_summarize and its fold where
documents are split, adjoint_scan, gradients, and adjoint_activate where inputs came raw."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longdelta.ops.forward import (
    Activated,
    Machine,
    Operands,
    activate,
    enter_borders,
    pass_empty_documents,
    prepare,
)
from longdelta.plan.tensors import BACKWARD, COTANGENTS, KEPT


@dataclass(frozen=True)
class Cotangents:
    """Of the outputs; None stands for zeros, with the same bits."""

    do: Tensor | None
    d_final_state: Tensor | None


@dataclass(frozen=True)
class Gradients:
    """Places for those of the inputs as they came, in the input's dtype and layout."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    d_initial_state: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None


def _tapes(
    x: Activated, operands: Operands, machine: Machine, save: str, held: dict[str, Tensor]
) -> None:
    """Whatever the forward did not keep, from the same stages and so with the same bits."""
    kept = KEPT[save]
    if "Z" not in kept:
        prepare(x, machine, held)
    if "S_border" not in kept:
        enter_borders(x, operands, machine, held)
    if "S" not in kept:
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
            machine.tables,
            o=None,
            final_state=None,
            S=held["S"],
            Uh=held["Uh"],
        )


def _adjoint_walks(
    x: Activated,
    operands: Operands,
    do: Tensor,
    d_final_state: Tensor | None,
    machine: Machine,
    held: dict[str, Tensor],
    d_initial_state: Tensor | None,
) -> None:
    tables, backend = machine.tables, machine.backend
    common = (x.q, x.k, x.beta, do, held["G"], held["Z"])
    if tables.walk.borders:
        backend.adjoint_summarize(
            *common,
            held["bound"],
            d_final_state,
            operands.scale,
            tables,
            dS_border=held["dS_border"],
        )
    machine.boundary.leave(backend, held["M"], held["M_bound"], tables, dS_border=held["dS_border"])
    backend.adjoint_scan(
        *common,
        held["dS_border"],
        d_final_state,
        operands.scale,
        tables,
        dS=held["dS"],
        dR=held["dR"],
        d_initial_state=d_initial_state,
    )
    pass_empty_documents(tables.walk.empty, d_final_state, d_initial_state, adjoint=True)


def _adjoint_activate(
    operands: Operands, machine: Machine, held: dict[str, Tensor], found: Gradients
) -> None:
    """From the cotangents of what `activate` made to those of the inputs as they came."""
    x, raw = operands, operands.activation
    units = {name: held.get(name) for name in ("dq_unit", "dk_unit", "dg", "dbeta")}
    if all(unit is None for unit in units.values()):
        return
    machine.backend.adjoint_activate(
        x.q,
        x.k,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        raw,
        machine.tables,
        *units.values(),
        dq=None if units["dq_unit"] is None else found.dq,
        dk=None if units["dk_unit"] is None else found.dk,
        da=None if units["dg"] is None else found.dg,
        db=None if units["dbeta"] is None else found.dbeta,
        dA_log=found.dA_log if raw.gate else None,
        ddt_bias=found.ddt_bias if raw.gate else None,
        gate_sums=held.get("gate_sums"),
    )


def backward(
    operands: Operands,
    cotangents: Cotangents,
    machine: Machine,
    *,
    save: str,
    saved: Tensor,
    found: Gradients,
) -> None:
    """Writes the gradient of every input, from the saved set and what has to be computed again."""
    tables = machine.tables
    sizes = operands.sizes(tables, machine.name)
    dtype, device = sizes.compute_dtype, operands.q.device
    held = sizes.views(KEPT[save], saved)
    made = operands.activated(dtype)
    names = made + BACKWARD + tuple(x for name in made for x in COTANGENTS[name])
    held |= sizes.new(tuple(name for name in names if name not in held), device)
    x = activate(operands, machine, held)
    _tapes(x, operands, machine, save, held)
    do = torch.zeros_like(operands.v) if cotangents.do is None else cotangents.do
    d_state = place = found.d_initial_state
    if place is not None and place.dtype != dtype:
        d_state = torch.empty_like(place, dtype=dtype)
    _adjoint_walks(x, operands, do, cotangents.d_final_state, machine, held, d_state)
    if place is not None and d_state is not None and d_state is not place:
        place.copy_(d_state)
    machine.backend.gradients(
        x.q,
        x.k,
        x.g,
        x.beta,
        do,
        held["G"],
        held["S"],
        held["Uh"],
        held["dS"],
        held["dR"],
        operands.scale,
        tables,
        dq=held.get("dq_unit", found.dq),
        dk=held.get("dk_unit", found.dk),
        dv=found.dv,
        dg=held.get("dg", found.dg),
        dbeta=held.get("dbeta", found.dbeta),
    )
    _adjoint_activate(operands, machine, held, found)
