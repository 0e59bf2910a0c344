"""The public operation, and the same without autograd; `arguments.py` checks its arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdelta.arguments import call_of, inputs_of, require, state_shape
from longdelta.errors import InvalidInput
from longdelta.ops.library import call, call_backward
from longdelta.ops.recompute import RecomputeHandle
from longdelta.ops.transforms import refuse_forward_mode


class ForwardResult(NamedTuple):
    """o [B, T, HV, V]; final_state [N, HV, K, V] or None; saved: for `gdn_backward`."""

    o: Tensor
    final_state: Tensor | None
    saved: Saved


class BackwardResult(NamedTuple):
    """Each gradient has its input's shape and dtype; None for an input that was not given."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    d_initial_state: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None


class Saved(NamedTuple):
    """The saved set of one forward, and the call that it belongs to."""

    tensor: Tensor
    save: str
    call: dict[str, object]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    deterministic: bool = True,
    save: str = "auto",
    recompute: RecomputeHandle | None = None,
    workspace: object | None = None,
    graph: str = "off",
    backend: str = "auto",
    **extra: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over packed documents, evaluated in chunks of 64 tokens. Differentiable.

    Per document and value head, with S in R^{K x V} and row vectors q, k, v:
        S_t = e^{g_t} S_{t-1} + k_t^T beta_t (v_t - e^{g_t} k_t S_{t-1}),    o_t = scale q_t S_t

    Args:
        q, k: ``[B, T, H, K]`` bfloat16, float16, float32 or float64, any strides. Rows of k should
            have unit norm (not checked): the rule diverges where beta |k|^2 > 2.
        v: ``[B, T, HV, V]``, dtype of q, ``HV % H == 0``; value head h reads q/k head
            ``h // (HV // H)``.
        g: ``[B, T, HV]``, any float: natural logarithm of one token's decay. ``g <= 0`` is meant;
            values below -87 count as -87 (a new document); positive g is computed as it stands and
            can overflow.
        beta: ``[B, T, HV]``, any float, in [0, 2].
        scale: default ``K ** -0.5``; applies after the norm of q.
        initial_state: ``[N, HV, K, V]``, any float, or None for zeros; one row per document.
        output_final_state: return the state after each document's last token.
        use_qk_l2norm_in_kernel: q and k are raw; x / sqrt(sum x^2 + 1e-6) is applied first.
        use_beta_sigmoid_in_kernel: beta is raw; its sigmoid is taken first.
        allow_neg_eigval: with the former: twice the sigmoid.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N + 1]`` int32 or int64, on q's device or the CPU, needs ``B == 1``: document
            n is rows ``cu_seqlens[n] : cu_seqlens[n + 1]``. Repeats mark empty documents; rows
            after the last boundary (all of them after ``[0]`` alone) give zero output and zero
            gradients. A device tensor costs one copy to the host per new content.
        cu_seqlens_cpu: the same on the CPU: no copy then, and where both are given it is this one
            that is read (a device tensor is not compared with it).
        chunk_indices: accepted for compatibility; not read.
        cp_context: which ranks hold the rest of each document, from
            ``longdelta.distributed.build_cp_context``; None: all of it is here. T is then this
            rank's rows (0 on a rank without tokens), the boundaries are the context's,
            initial_state has one row per document that starts here (``cp_context.starts``) and
            final_state one per document that ends here (``cp_context.ends``). Gradients of A_log
            and dt_bias are sums over this rank's tokens, as every parameter's: add them up over the
            group.
        use_gate_in_kernel: g is raw; -exp(A_log) softplus(g + dt_bias) is taken first.
        A_log, dt_bias: ``[HV]``, with the former; dt_bias may be None.
        deterministic: promise equal bits, see docs/design/determinism.md. False may choose faster
            plans. ``torch.use_deterministic_algorithms(True)`` turns it on.
        save: what the forward keeps for the backward besides the inputs: "none", "light" (states at
            segment borders), "full" (all tapes) or "auto": "light" where a gradient is required,
            else "none". The bits do not depend on it.
        recompute: a ``longdelta.distributed.RecomputeHandle``: a first call with it keeps what
            crossed ranks, a second one (the recomputation in a backward) takes it from there.
        workspace, graph: not yet.
        backend: "auto", "eager" or "gluon".
        extra: keywords that model code hands on (chunk_size, max_length, ...) and unknown ones
            that are None or False are ignored, other unknown ones with a warning; a near miss of an
            option's name, and what would change the result (attention_mask, lower_bound, any
            ``use_...``), is an error. ``transpose_state_layout`` means ``state_v_first``.
    Returns:
        ``(o, final_state)``: o like v; final_state ``[N, HV, K, V]`` float32 (float64 for float64
        inputs), or None where it was not asked for.
    Raises:
        InvalidInput (a ValueError): an argument is wrong; names it, what it must be and what came.
        UnsupportedProblem: the backend asked for does not take this problem.
        NotYet: an argument of a later version.
    Source: Yang et al., arXiv:2412.06464; argument names and layout follow
    ``fla.ops.gated_delta_rule``.
    """
    inputs = inputs_of(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_indices=chunk_indices,
        cp_context=cp_context,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        deterministic=deterministic,
        save=save,
        recompute=recompute,
        workspace=workspace,
        graph=graph,
        backend=backend,
        **extra,
    )
    o, final_state, _ = call(inputs)
    return o, final_state if output_final_state else None


def gdn_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, save: str = "light", **options: Any
) -> ForwardResult:
    """The forward of `chunk_gated_delta_rule` without autograd, and what it keeps.

    o_t = scale q_t S_t, with S_t as in `chunk_gated_delta_rule`.

    Args:
        q, k, v, g, beta: as in `chunk_gated_delta_rule`: ``[B, T, H, K]``, ``[B, T, HV, V]``,
            ``[B, T, HV]``.
        save: "none", "light" or "full".
        options: the other keywords of `chunk_gated_delta_rule`, with the same meaning.
    Returns:
        ``ForwardResult(o, final_state, saved)``.
    Raises:
        InvalidInput, UnsupportedProblem, NotYet: as `chunk_gated_delta_rule`.
    Source: Yang et al., arXiv:2412.06464.
    """
    inputs = inputs_of(q, k, v, g, beta, save=save, **options)
    with torch.no_grad():
        o, final_state, saved = call(inputs)
    state = final_state if inputs.output_final_state else None
    return ForwardResult(o, state, Saved(saved, inputs.save, call_of(inputs)))


def gdn_backward(
    do: Tensor | None,
    d_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    saved: Saved | None = None,
    **options: Any,
) -> BackwardResult:
    """Gradients of <do, o> + <d_final_state, final_state>, without autograd.

    Args:
        do: ``[B, T, HV, V]``, cotangent of o, or None for zeros.
        d_final_state: ``[N, HV, K, V]``, cotangent of final_state, or None for zeros.
        q, k, v, g, beta: the forward's.
        saved: of `gdn_forward` with the same inputs; None: everything is computed again.
        options: the forward's other keywords.
    Returns:
        ``BackwardResult``: by name, each gradient in its input's shape and dtype.
    Raises:
        InvalidInput: also where saved belongs to a call of other shapes or options.
        UnsupportedProblem, NotYet: as `chunk_gated_delta_rule`.
    Source: Yang et al., arXiv:2412.06464; formulas in docs/math.md.
    """
    keep = "none" if saved is None else saved.save
    if options.pop("save", keep) not in (keep, "auto") and saved is not None:
        raise InvalidInput(f"save must be that of the saved set, {keep!r}, or left out")
    inputs = inputs_of(q, k, v, g, beta, save=keep, **options)
    if saved is not None and saved.call != (call := call_of(inputs)):
        others = [
            f"{name} was {saved.call.get(name)}, is {value}"
            for name, value in call.items()
            if saved.call.get(name) != value
        ]
        raise InvalidInput(
            "saved must come from gdn_forward with the same shapes and options; "
            f"{'; '.join(others)}. Pass saved=None to compute it again"
        )
    refuse_forward_mode(do, d_final_state)
    if do is not None:
        require("do", do, v.shape, like=q)
    if d_final_state is not None:
        shape = state_shape(inputs, inputs.final_rows)
        require("d_final_state", d_final_state, shape, like=q)
    with torch.no_grad():
        tensor = q.new_empty([0], dtype=torch.uint8) if saved is None else saved.tensor
        found = call_backward(do, d_final_state, tensor, inputs)
    dq, dk, dv, dg, dbeta, d_initial_state, dA_log, ddt_bias = found
    return BackwardResult(
        dq,
        dk,
        dv,
        dg,
        dbeta,
        None if inputs.initial_state is None else d_initial_state,
        None if inputs.A_log is None else dA_log,
        None if inputs.dt_bias is None else ddt_bias,
    )
