"""Arguments of the op: resolved and checked here, once; everything below trusts them."""

from __future__ import annotations

import difflib
import inspect
import warnings
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from longdelta.errors import InvalidInput, NotYet
from longdelta.ops import plans
from longdelta.ops.dispatch import traced
from longdelta.ops.library import Inputs
from longdelta.ops.plans import host_offsets
from longdelta.ops.recompute import RecomputeHandle, active
from longdelta.ops.select import BACKENDS
from longdelta.ops.transforms import refuse_forward_mode, refuse_functional_grad
from longdelta.plan.tensors import KEPT, SAVE_MODES

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TOLERATED = frozenset(
    {
        "chunk_size",
        "head_first",
        "max_length",
        "max_length_k",
        "max_length_q",
        "max_seqlen",
        "output_attentions",
        "position_ids",
        "transpose_state_layout",
        "use_cache",
    }
)
"""Keywords that model code hands to every attention; what they can change is looked at apart."""
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "offsets", "segment_ids")
"""Keywords that tell documents apart: nothing new beside cu_seqlens, without it a leak."""
_FLAGS = {
    "qk_l2norm": "use_qk_l2norm_in_kernel",
    "gate": "use_gate_in_kernel",
    "beta_sigmoid": "use_beta_sigmoid_in_kernel",
    "neg_eigval": "allow_neg_eigval",
    "state_v_first": "state_v_first",
    "output_final_state": "output_final_state",
}
"""Fields of `Inputs` and the keywords that set them."""
_CHANGES = frozenset({"attention_mask", "lower_bound", "safe_gate", "window_size", "dropout"})
"""Keywords of related operations that would change the result."""
_said: set[str] = set()


def inputs_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
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
) -> Inputs:
    """The operators' arguments, checked. Keywords and defaults: `chunk_gated_delta_rule`."""
    packed = not (cu_seqlens is cu_seqlens_cpu is cp_context is None)
    _check_extra(extra, packed)
    _check_not_yet(workspace, graph)
    context, cu_seqlens, cu_seqlens_cpu = _resolve_context(cp_context, cu_seqlens, cu_seqlens_cpu)
    differentiable = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        cu_seqlens=_saveable(cu_seqlens),
        cu_seqlens_cpu=_saveable(cu_seqlens_cpu),
        context=context,
        recompute=_resolve_recompute(recompute, context),
        scale=_resolve_scale(scale, q),
        qk_l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first or bool(extra.get("transpose_state_layout")),
        deterministic=_resolve_deterministic(deterministic),
        output_final_state=output_final_state,
        final_rows=0,
        save=_resolve_save(save, differentiable),
        backend=backend,
        traced=traced(),
    )
    _check_operands(inputs)
    rows = _check_context(inputs, cp_context)
    _check_states(inputs, rows[0])
    refuse_forward_mode(*differentiable)
    refuse_functional_grad()
    if recompute is not None and type(q) in (Tensor, nn.Parameter):
        recompute.begin()  # a fake tensor's run is none
    return inputs._replace(final_rows=rows[1])


_OPTIONS = frozenset(inspect.signature(inputs_of).parameters) - {"extra"}


def call_of(inputs: Inputs) -> dict[str, object]:
    """What a saved set depends on besides the values of the tensors, by name; a context by its
    handle."""
    offsets = inputs.cu_seqlens if inputs.cu_seqlens_cpu is None else inputs.cu_seqlens_cpu
    call: dict[str, object] = {
        "shape of q": tuple(inputs.q.shape),
        "shape of v": tuple(inputs.v.shape),
        "documents": inputs.documents,
        "cu_seqlens": host_offsets(offsets) if type(offsets) is Tensor else None,
        "cp_context": None if inputs.context is None else int(inputs.context[0]),
        "dtype of q": str(inputs.q.dtype),
        "device": str(inputs.q.device),
        "an initial_state": inputs.initial_state is not None,
        "a dt_bias": inputs.dt_bias is not None,
    }
    for name in ("scale", *_FLAGS, "deterministic", "save", "backend"):
        if name != "output_final_state":  # which changes nothing that is kept
            call[_FLAGS.get(name, name)] = getattr(inputs, name)
    # A set from before a change of these is no set of today.
    return call | {"what it keeps": KEPT[inputs.save]}


def _saveable(offsets: Tensor | None) -> Tensor | None:
    """Boundaries as the backward will find them. Those on the CPU may share memory with a buffer
    that is filled anew before it runs; a tensor of inference mode cannot be saved for it."""
    if not isinstance(offsets, Tensor):
        return offsets
    if offsets.device.type in plans.READ_EVERY_TIME:
        return offsets.clone()
    if not torch.compiler.is_compiling() and offsets.is_inference() and torch.is_grad_enabled():
        return offsets.clone()
    return offsets


def _resolve_scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        measured = isinstance(q, Tensor) and q.dim() > 0 and q.shape[-1] > 0
        return float(q.shape[-1] ** -0.5) if measured else 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise InvalidInput(f"scale must be a number or None; got {type(scale).__name__}")
    if not isfinite(scale):
        raise InvalidInput(f"scale must be finite; got {scale}; the default is K ** -0.5")
    return float(scale)


def _resolve_deterministic(deterministic: bool) -> bool:
    if not isinstance(deterministic, bool):
        raise InvalidInput(f"deterministic must be True or False; got {deterministic!r}")
    if not deterministic and torch.are_deterministic_algorithms_enabled():
        if not torch.compiler.is_compiling():
            _warn_once(
                "deterministic=False is overruled by torch.use_deterministic_algorithms(True)"
            )
        return True
    return deterministic


def _resolve_save(save: str, tensors: tuple[Tensor | None, ...]) -> str:
    if save == "auto":
        wanted = any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        return "light" if wanted and torch.is_grad_enabled() else "none"
    if save not in SAVE_MODES:
        raise InvalidInput(f"save must be one of auto, {', '.join(SAVE_MODES)}; got {save!r}")
    return save


def _warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(f"longdelta: {message}", stacklevel=5)


def _check_extra(extra: dict[str, Any], packed: bool) -> None:
    if extra.get("head_first"):
        raise InvalidInput(
            f"head_first must be False, got {extra['head_first']!r}: tensors are "
            "[B, T, heads, dim]; transpose them"
        )
    for name, value in extra.items():
        if name in _PACKING and value is not None and not packed:
            raise InvalidInput(
                f"{name} must come with cu_seqlens, by which alone documents are told apart; got "
                f"{type(value).__name__} and cu_seqlens=None. Pass cu_seqlens too"
            )
        if name in _TOLERATED or name in _PACKING:
            continue
        near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.8)
        if near:
            raise InvalidInput(f"unknown option {name!r}; did you mean {near[0]!r}?")
        if value is None or value is False:
            continue
        if name in _CHANGES or name.startswith("use_"):
            raise InvalidInput(
                f"{name} must be None or False: it would change the result and is not an option "
                f"here; got {type(value).__name__}. See chunk_gated_delta_rule for the options"
            )
        _warn_once(f"keyword {name!r} is not an option of the gated delta rule and is ignored")


def _check_not_yet(workspace: object, graph: object) -> None:
    if graph not in ("off", "replay"):
        raise InvalidInput(f"graph must be 'off' or 'replay'; got {graph!r}")
    if workspace is not None:
        raise NotYet("workspace is not implemented in this version; pass None")
    if graph == "replay":
        raise NotYet("graph='replay' is not implemented in this version; pass graph='off'")


def _resolve_context(
    cp_context: Any, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The handle (None for one rank) and the boundaries: a context brings its own."""
    if cp_context is None:
        return None, cu_seqlens, cu_seqlens_cpu
    if not hasattr(cp_context, "parts") or not hasattr(cp_context, "handle"):
        raise InvalidInput(
            "cp_context must come from longdelta.distributed.build_cp_context; got "
            f"{type(cp_context).__name__}"
        )
    for name, given in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if given is not None and given is not cp_context.cu_seqlens:
            raise InvalidInput(
                f"{name} must be None with cp_context, which knows this rank's boundaries; got a "
                "tensor. Build the context from the whole batch's cu_seqlens"
            )
    handle = cp_context.handle if cp_context.ranks > 1 else None
    return handle, None, cp_context.cu_seqlens


def _resolve_recompute(recompute: Any, context: Tensor | None) -> Tensor | None:
    """The handle given, or that of the checkpointed function this runs in, where ranks exchange."""
    if recompute is not None:
        if not isinstance(recompute, RecomputeHandle):
            raise InvalidInput(
                "recompute must be a longdelta.distributed.RecomputeHandle or None; got "
                f"{type(recompute).__name__}"
            )
        return recompute.handle
    within = None if context is None else active()
    return None if within is None else within.handle


def _check_context(inputs: Inputs, cp_context: Any) -> tuple[int, int]:
    """Rows of initial_state and of final_state."""
    if cp_context is None:
        return inputs.documents, inputs.documents
    B, T = inputs.q.shape[:2]
    if B != 1 or cp_context.rows != T:
        raise InvalidInput(
            f"q must be [1, {cp_context.rows}, H, K]: rank {cp_context.rank} of this cp_context "
            f"holds {cp_context.rows} rows; got {list(inputs.q.shape)}; see cp_context.shard"
        )
    return len(cp_context.starts), len(cp_context.ends)


def require(name: str, x: object, shape: Any, *, like: Tensor, hint: str = "") -> None:
    """A float tensor of this shape on q's device."""
    if not isinstance(x, Tensor):
        came = type(x).__name__
        raise InvalidInput(f"{name} must be a tensor {list(shape)}; got {came}{hint}")
    if tuple(x.shape) != tuple(shape):
        raise InvalidInput(f"{name} must be {list(shape)}; got {list(x.shape)}{hint}")
    if x.dtype not in _DTYPES:
        raise InvalidInput(
            f"{name} must be bfloat16, float16, float32 or float64; got {x.dtype}; cast it"
        )
    if x.device != like.device:
        raise InvalidInput(f"{name} must be on q's device {like.device}; got {x.device}; move it")


def state_shape(inputs: Inputs, rows: int) -> list[int]:
    """Of `rows` states, in the order of state_v_first."""
    HV, V, K = inputs.v.shape[2], inputs.v.shape[3], inputs.k.shape[3]
    return [rows, HV, *((V, K) if inputs.state_v_first else (K, V))]


def _check_operands(inputs: Inputs) -> None:
    """Raises unless the shapes, dtypes, devices and options fit together."""
    q, k, v = inputs.q, inputs.k, inputs.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            came = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"{name} must be a tensor [B, T, heads, dim]; got {came}")
    B, T, H, K = q.shape
    HV = v.shape[2]
    if H < 1 or K < 1 or v.shape[3] < 1:
        raise InvalidInput(
            f"q and v must have heads and dims; got {list(q.shape)}, {list(v.shape)}"
        )
    require("q", q, q.shape, like=q)
    require("k", k, q.shape, like=q, hint="; k has q's shape")
    require("v", v, [B, T, *v.shape[2:]], like=q, hint="; B and T are q's")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise InvalidInput(f"{name} must have q's dtype {q.dtype}; got {x.dtype}; cast it")
    if HV < 1 or HV % H:
        raise InvalidInput(
            f"v must have a multiple of q's heads: HV % H == 0; got HV = {HV}, H = {H}"
        )
    require("g", inputs.g, [B, T, HV], like=q, hint="; one gate per value head")
    require("beta", inputs.beta, [B, T, HV], like=q, hint="; one beta per value head")
    _check_flags(inputs)
    _check_offsets(inputs, B)


def _check_states(inputs: Inputs, rows: int) -> None:
    if inputs.initial_state is not None:
        shape = state_shape(inputs, rows)
        hint = f"; a state per document that starts here, state_v_first={inputs.state_v_first}"
        require("initial_state", inputs.initial_state, shape, like=inputs.q, hint=hint)


def _check_flags(inputs: Inputs) -> None:
    q, HV = inputs.q, inputs.v.shape[2]
    for name, keyword in _FLAGS.items():
        if not isinstance(getattr(inputs, name), bool):
            raise InvalidInput(f"{keyword} must be True or False; got {getattr(inputs, name)!r}")
    if inputs.backend not in BACKENDS:
        raise InvalidInput(f"backend must be one of {', '.join(BACKENDS)}; got {inputs.backend!r}")
    if inputs.neg_eigval and not inputs.beta_sigmoid:
        raise InvalidInput("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if inputs.gate:
        require("A_log", inputs.A_log, [HV], like=q, hint="; use_gate_in_kernel=True needs it")
        if inputs.dt_bias is not None:
            require("dt_bias", inputs.dt_bias, [HV], like=q)
    elif inputs.A_log is not None or inputs.dt_bias is not None:
        raise InvalidInput("A_log and dt_bias need use_gate_in_kernel=True; got False")


def _check_offsets(inputs: Inputs, B: int) -> None:
    """Form only: the content is read, and checked, once per new plan."""
    device, cpu = inputs.cu_seqlens, inputs.cu_seqlens_cpu
    for name, x in (("cu_seqlens", device), ("cu_seqlens_cpu", cpu)):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dim() != 1 or x.shape[0] < 1:
            came = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(
                f"{name} must be a tensor [N + 1] of boundaries, the first of them 0; got {came}; "
                "torch.tensor(...) makes one of a list"
            )
        if x.dtype not in (torch.int32, torch.int64):
            raise InvalidInput(f"{name} must be int32 or int64; got {x.dtype}")
        if B != 1:
            raise InvalidInput(
                f"{name} needs B == 1 (documents packed along T); got B = {B}; reshape q, k, v, g "
                "and beta to [1, B * T, ...]"
            )
    if device is not None and device.device not in (inputs.q.device, torch.device("cpu")):
        raise InvalidInput(
            f"cu_seqlens must be on q's device {inputs.q.device} or the CPU; got {device.device}"
        )
    if cpu is not None and cpu.device.type != "cpu":
        raise InvalidInput(f"cu_seqlens_cpu must be on the CPU; got {cpu.device}")
    if device is not None and cpu is not None and device.shape != cpu.shape:
        raise InvalidInput(
            f"cu_seqlens_cpu must have cu_seqlens's shape {list(device.shape)}; got "
            f"{list(cpu.shape)}"
        )
    # A device tensor would have to be copied, a traced one holds nothing.
    if (
        type(device) is Tensor
        and type(cpu) is Tensor
        and device.device.type in plans.READ_EVERY_TIME
    ):
        here, there = device.tolist(), cpu.tolist()
        if here != there:
            raise InvalidInput(
                f"cu_seqlens_cpu must hold cu_seqlens's boundaries {here[:8]}; got {there[:8]}; "
                "one of the two is enough"
            )
