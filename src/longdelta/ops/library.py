"""The two operators that torch sees, `longdelta::forward` and `longdelta::backward`: all stages and
every exchange lie inside one of them.

The plan enters as the offsets tensor itself, or as the handle of a context: neither content ever
specialises a compiled graph, and plans.py turns offsets into tables at run time. The saved set is
one flat tensor of bytes whose size follows from (T, N, HV) alone in a compiled graph
(plan/tensors.py, Note [Capacity]); elsewhere from the packing, whichever way the call takes, since
torch's checkpointing compares the sizes of a call and its repetition.

Note [Autograd]: `torch.library.register_autograd` registers what `_autograd` does, but every call
then also goes through the schema's arguments, in a time that grows with the square of their number:
147 of 284 us of a forward (docs/log.md, 2026-11-30, eager calls). It fills in defaults, which no
argument of these operators has.

Note [Dispatcher]: the operators are there for compilers, tracers, fake tensors, subclasses, modes
and profilers. Where none of them looks on, a call of the op leaves the dispatcher out: its two
walks take the arguments apart and put them together again, 25 us of 150.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdelta.kernels.stages import Activation
from longdelta.ops import backward as _backward
from longdelta.ops import forward as _forward
from longdelta.ops.boundary import Context, Segments
from longdelta.ops.dispatch import looked_on, plain
from longdelta.ops.forward import Machine, Operands
from longdelta.ops.handles import held_by
from longdelta.ops.plans import tables_of
from longdelta.ops.saved import compute_dtype, dtype_name
from longdelta.ops.select import selected, stages
from longdelta.ops.self_test import require_backward
from longdelta.ops.transforms import refuse_forward_mode
from longdelta.plan.tensors import Counts, capacity, saved_bytes
from longdelta.runtime.launch import Scope

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? context, "
    "Tensor? recompute, float scale, "
    "bool qk_l2norm, bool gate, bool beta_sigmoid, bool neg_eigval, bool state_v_first, "
    "bool deterministic, bool output_final_state, SymInt final_rows, str save, str backend, "
    "bool traced"
)
_TENSORS = 12
_NAMED = torch._C._profiler._RecordFunctionFast
"""A name for observers that do not show as profilers."""
_AS_IT_IS = nullcontext()
_known_bytes = lru_cache(maxsize=256)(saved_bytes)
_library = torch.library.Library("longdelta", "DEF")
_library.define(f"forward({_INPUTS}) -> (Tensor o, Tensor final_state, Tensor saved)")
_library.define(
    f"backward(Tensor? do, Tensor? d_final_state, Tensor saved, {_INPUTS}) -> (Tensor dq, "
    "Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor d_initial_state, Tensor dA_log, "
    "Tensor ddt_bias)"
)


class Inputs(NamedTuple):
    """The operators' common arguments, in the schema's order."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    context: Tensor | None
    """Handle of a CPContext, with an entry more than the rank has edges: a shape, which a graph
    does not specialise on. cu_seqlens_cpu then holds the boundaries of this rank's fragments."""
    recompute: Tensor | None
    """Handle of a RecomputeHandle."""
    scale: float
    qk_l2norm: bool
    gate: bool
    beta_sigmoid: bool
    neg_eigval: bool
    state_v_first: bool
    deterministic: bool
    output_final_state: bool
    final_rows: int
    """Rows of final_state: documents, or those that end on this rank."""
    save: str
    backend: str
    traced: bool
    """Whether this goes into a graph, which must know the size of the saved set."""

    @property
    def by_gradient(self) -> tuple[Tensor | None, ...]:
        """The inputs that can have a gradient, in the order of the backward's results."""
        optional = (self.initial_state, self.A_log, self.dt_bias)
        return (self.q, self.k, self.v, self.g, self.beta, *optional)

    @property
    def documents(self) -> int:
        offsets = self.cu_seqlens_cpu if self.cu_seqlens is None else self.cu_seqlens
        return self.q.shape[0] if offsets is None else offsets.shape[0] - 1

    def new_outputs(self, counts: Counts | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """o, final_state and saved, unwritten; final_state is empty where nobody asked for it.

        counts: of the packing; None: of the worst one (plan/tensors.py, Note [Capacity]).
        """
        B, T = self.v.shape[:2]
        # int: heads and dims decide the backend and the plan, so a compiled graph is for its own.
        HV, V, K = int(self.v.shape[2]), int(self.v.shape[3]), int(self.k.shape[3])
        dtype = compute_dtype(self.q.dtype)
        shape = [self.final_rows, HV, *((V, K) if self.state_v_first else (K, V))]
        name = selected(self.q.device, self.q.dtype, K, V, self.backend)
        edges = 0 if self.context is None else self.context.shape[0] - 1
        most = counts or capacity(B * T, self.documents, HV, edges)
        symbolic = type(most.chunks) is not int
        size = (saved_bytes if symbolic else _known_bytes)(
            self.save, most, HV=HV, K=K, V=V, dtype=dtype_name(self.q.dtype), backend=name
        )
        device = self.q.device
        o = torch.empty(self.v.shape, dtype=self.v.dtype, device=device)
        state = torch.empty(shape if self.output_final_state else [0], dtype=dtype, device=device)
        return o, state, torch.empty([size], dtype=torch.uint8, device=device)

    def new_gradients(self) -> tuple[Tensor, ...]:
        """Unwritten gradients, in the schema's order; empty for inputs that were not given."""
        return tuple(
            self.q.new_empty([0]) if x is None else x.new_empty(x.shape) for x in self.by_gradient
        )

    def k_first(self, state: Tensor | None) -> Tensor | None:
        """A state as [., HV, K, V]."""
        return state.transpose(-1, -2) if state is not None and self.state_v_first else state

    def operands(self) -> Operands:
        return Operands(
            q=self.q.flatten(0, 1),
            k=self.k.flatten(0, 1),
            v=self.v.flatten(0, 1),
            g=self.g.flatten(0, 1),
            beta=self.beta.flatten(0, 1),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            initial_state=self.k_first(self.initial_state),
            activation=Activation(self.qk_l2norm, self.gate, self.beta_sigmoid, self.neg_eigval),
            scale=self.scale,
        )

    def machine(self) -> Machine:
        B, T, HV, V = self.v.shape
        device = self.q.device
        name = selected(device, self.q.dtype, self.k.shape[3], V, self.backend)
        if self.context is not None:
            context: Context = held_by(self.context, "cp_context")
            tables, boundary = context.parts(HV, self.deterministic, device)
        else:
            tables = tables_of(
                self.cu_seqlens,
                self.cu_seqlens_cpu,
                B=B,
                T=T,
                HV=HV,
                deterministic=self.deterministic,
                device=device,
            )
            boundary = Segments()
        return Machine(name, stages(name), tables, boundary)


def _without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """The caller's autocast would reach into the stages and round their products."""
    device = q.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _AS_IT_IS


def _forward_impl(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(*arguments)
    refuse_forward_mode(*inputs.by_gradient)
    machine = inputs.machine()

    def body(o: Tensor, final_state: Tensor, saved: Tensor) -> None:
        _forward.forward(
            inputs.operands(),
            machine,
            save=inputs.save,
            saved=saved,
            o=o.flatten(0, 1),
            final_state=inputs.k_first(final_state) if inputs.output_final_state else None,
            recompute=None if inputs.recompute is None else held_by(inputs.recompute, "recompute"),
        )

    tables = machine.tables

    def make() -> tuple[Tensor, Tensor, Tensor]:
        return inputs.new_outputs(None if inputs.traced else tables.counts)

    with _without_autocast(inputs.q), Scope("forward", inputs.q.device, tables) as scope:
        # Exchanges between ranks are no launches, and the eager backend makes none.
        if machine.name == "eager" or inputs.context is not None or inputs.recompute is not None:
            o, final_state, saved = make()
            body(o, final_state, saved)
        else:
            options, given = arguments[_TENSORS:], inputs.by_gradient
            o, final_state, saved = tables.recordings.run(scope, options, given, make, body)
    return o, final_state, saved


def _backward_impl(
    do: Tensor | None, d_final_state: Tensor | None, saved: Tensor, *arguments: Any
) -> list[Tensor]:
    inputs = Inputs(*arguments)
    refuse_forward_mode(do, d_final_state, *inputs.by_gradient)
    machine = inputs.machine()
    if machine.name == "gluon":
        require_backward(inputs.q.device)
    cotangents = _backward.Cotangents(
        do=None if do is None else do.flatten(0, 1), d_final_state=inputs.k_first(d_final_state)
    )

    def body(
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dg: Tensor,
        dbeta: Tensor,
        d_initial_state: Tensor,
        dA_log: Tensor,
        ddt_bias: Tensor,
    ) -> None:
        x = inputs
        found = _backward.Gradients(
            dq=dq.flatten(0, 1),
            dk=dk.flatten(0, 1),
            dv=dv.flatten(0, 1),
            dg=dg.flatten(0, 1),
            dbeta=dbeta.flatten(0, 1),
            d_initial_state=None if x.initial_state is None else x.k_first(d_initial_state),
            dA_log=None if x.A_log is None else dA_log,
            ddt_bias=None if x.dt_bias is None else ddt_bias,
        )
        _backward.backward(
            inputs.operands(), cotangents, machine, save=inputs.save, saved=saved, found=found
        )

    tables = machine.tables
    with _without_autocast(inputs.q), Scope("backward", inputs.q.device, tables) as scope:
        if machine.name == "eager" or inputs.context is not None:
            gradients = inputs.new_gradients()
            body(*gradients)
            return list(gradients)
        given = (do, d_final_state, saved, *inputs.by_gradient)
        options = ("backward", *arguments[_TENSORS:])
        make = inputs.new_gradients
        return list(tables.recordings.run(scope, options, given, make, body, with_parts=saved))


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return Inputs(*arguments).new_outputs()


def _backward_fake(
    do: Tensor | None, d_final_state: Tensor | None, saved: Tensor, *arguments: Any
) -> list[Tensor]:
    return list(Inputs(*arguments).new_gradients())


def _differentiate(ctx: Any, do: Tensor, d_final_state: Tensor, _: Any) -> list[Tensor | None]:
    """Of each tensor among the inputs."""
    saved, *tensors = ctx.saved_tensors
    inputs = Inputs(*tensors, *ctx.options)
    dq, dk, dv, dg, dbeta, d_initial_state, dA_log, ddt_bias = call_backward(
        do, d_final_state if inputs.output_final_state else None, saved, inputs
    )
    found: tuple[Tensor | None, ...] = (
        dq,
        dk,
        dv,
        dg,
        dbeta,
        dA_log,
        ddt_bias,
        d_initial_state,
    )
    found += (None,) * (_TENSORS - len(found))
    needed = ctx.needs_input_grad[-_TENSORS:]
    return [x if need else None for x, need in zip(found, needed, strict=True)]


class GatedDeltaRule(torch.autograd.Function):
    """Notes [Autograd] and [Dispatcher]: of an output that is there already."""

    @staticmethod
    def forward(
        ctx: Any, output: tuple[Tensor, ...], options: tuple[Any, ...], *tensors: Tensor | None
    ) -> Any:
        ctx.save_for_backward(output[2], *tensors)
        ctx.options = options
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return (None, None, *_differentiate(ctx, *cotangents))


def call(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """`longdelta::forward`: Note [Dispatcher]."""
    if looked_on() or not plain(inputs[:_TENSORS]):
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.longdelta.forward(*inputs)
        return found
    with _NAMED("longdelta::forward"), torch._C._AutoDispatchBelowAutograd():
        output = _forward_impl(*inputs)
    return _differentiable(output, inputs)


def call_backward(
    do: Tensor | None, d_final_state: Tensor | None, saved: Tensor, inputs: Inputs
) -> list[Tensor]:
    """`longdelta::backward`: Note [Dispatcher]. Where gradients are enabled, it is to refuse."""
    tensors = (do, d_final_state, saved, *inputs[:_TENSORS])
    if torch.is_grad_enabled() or looked_on() or not plain(tensors):
        found: list[Tensor] = torch.ops.longdelta.backward(do, d_final_state, saved, *inputs)
        return found
    with _NAMED("longdelta::backward"), torch._C._AutoDispatchBelowAutograd():
        return _backward_impl(do, d_final_state, saved, *inputs)


def _differentiable(
    output: tuple[Tensor, Tensor, Tensor], inputs: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The output with its place in autograd's graph, if any input requires a gradient.

    After the launches: the GPU works while autograd takes its notes.
    """
    tensors = inputs[:_TENSORS]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        found: tuple[Tensor, Tensor, Tensor] = GatedDeltaRule.apply(  # type: ignore[no-untyped-call]
            output, inputs[_TENSORS:], *tensors
        )
        return found
    return output


def _autograd(keys: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """keys: of the dispatcher, which goes on with those after autograd's."""
    with torch._C._AutoDispatchBelowAutograd():
        output = torch.ops.longdelta.forward.default.redispatch(
            keys & torch._C._after_autograd_keyset, *inputs
        )
    return _differentiable(output, inputs)


def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "longdelta: the backward is differentiable once; a second backward through it is not "
        "implemented. Do not pass create_graph=True through chunk_gated_delta_rule."
    )


_library.impl("forward", _forward_impl, "CompositeExplicitAutograd")
_library.impl("backward", _backward_impl, "CompositeExplicitAutograd")
torch.library.register_fake("longdelta::forward", _forward_fake, lib=_library)
torch.library.register_fake("longdelta::backward", _backward_fake, lib=_library)
_library.impl("forward", _autograd, "Autograd", with_keyset=True)
torch.library.register_autograd(
    "longdelta::backward", _refuse, setup_context=lambda ctx, inputs, output: None, lib=_library
)
