"""The backward: the forward's stages that were not saved, then adjoint_summarize and its fold where
documents are split, adjoint_scan, gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longdelta.kernels.eager.activate import adjoint_beta, adjoint_gate, adjoint_norm
from longdelta.ops.forward import (
    Activated,
    Machine,
    Operands,
    activate,
    enter_borders,
    pass_empty_documents,
    prepare,
)
from longdelta.plan.tensors import BACKWARD, KEPT


@dataclass(frozen=True)
class Cotangents:
    """Of the outputs; None stands for zeros, with the same bits."""

    do: Tensor | None
    d_final_state: Tensor | None


@dataclass
class Gradients:
    """Of the inputs as they came, in the compute dtype or the input's own."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    d_initial_state: Tensor | None
    dA_log: Tensor | None = None
    ddt_bias: Tensor | None = None


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


def _adjoint_activation(operands: Operands, found: Gradients, used: int) -> None:
    """Through the activations of raw inputs. Rows of no document stay 0, whatever they hold."""
    raw, x = operands.activation, operands
    if raw.qk_l2norm:
        found.dq[:used] = adjoint_norm(x.q[:used], found.dq[:used])
        found.dk[:used] = adjoint_norm(x.k[:used], found.dk[:used])
    if raw.beta_sigmoid:
        found.dbeta[:used] = adjoint_beta(x.beta[:used], found.dbeta[:used], raw.top)
    if raw.gate:
        assert x.A_log is not None
        found.dg[:used], found.dA_log, found.ddt_bias = adjoint_gate(
            x.g[:used], x.A_log, x.dt_bias, found.dg[:used]
        )


def backward(
    operands: Operands, cotangents: Cotangents, machine: Machine, *, save: str, saved: Tensor
) -> Gradients:
    """Gradients of every input, from the saved set and whatever has to be computed again."""
    tables = machine.tables
    sizes = operands.sizes(tables, machine.name)
    dtype, device = sizes.compute_dtype, operands.q.device
    held = sizes.views(KEPT[save], saved)
    names = operands.activated(dtype) + BACKWARD
    held |= sizes.new(tuple(name for name in names if name not in held), device)
    x = activate(operands, machine, held)
    _tapes(x, operands, machine, save, held)
    do = torch.zeros_like(operands.v) if cotangents.do is None else cotangents.do
    initial = operands.initial_state
    d_initial_state = (
        None if initial is None else torch.empty(initial.shape, dtype=dtype, device=device)
    )
    _adjoint_walks(x, operands, do, cotangents.d_final_state, machine, held, d_initial_state)
    unrounded = dtype if operands.activation.qk_l2norm else x.q.dtype
    found = Gradients(
        dq=torch.empty(x.q.shape, dtype=unrounded, device=device),
        dk=torch.empty(x.k.shape, dtype=unrounded, device=device),
        dv=torch.empty(operands.v.shape, dtype=operands.v.dtype, device=device),
        dg=torch.empty(x.g.shape, dtype=dtype, device=device),
        dbeta=torch.empty(x.beta.shape, dtype=dtype, device=device),
        d_initial_state=d_initial_state,
    )
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
        dq=found.dq,
        dk=found.dk,
        dv=found.dv,
        dg=found.dg,
        dbeta=found.dbeta,
    )
    _adjoint_activation(operands, found, tables.walk.used_rows)
    return found
