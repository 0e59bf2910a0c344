"""The Gated DeltaNet layer, of the modules that a model author knows and the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longdelta.api import chunk_gated_delta_rule
from longdelta.distributed.context import CPContext
from longdelta.errors import InvalidInput
from longdelta.nn.conv import ShortConvolution
from longdelta.plan.checks import checked_int


class LayerState(NamedTuple):
    """What a document's next tokens need of its past ones.

    conv: ``[N, 2 H K + HV V, W - 1]``, the convolution's last inputs, q | k | v.
    S: ``[N, HV, K, V]``, the op's state.
    """

    conv: Tensor
    S: Tensor


class LayerOutput(NamedTuple):
    """``y`` ``[B, T, hidden]`` in x's dtype; ``final_state`` or None where it was not asked for."""

    y: Tensor
    final_state: LayerState | None


class Operands(NamedTuple):
    """What the op reads: q, k ``[B, T, H, K]``, v ``[B, T, HV, V]`` after the convolution, and the
    raw a, b ``[B, T, HV]`` of its gates; ``conv_state`` as in ``LayerState`` or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    conv_state: Tensor | None


class GatedDeltaNet(nn.Module):
    """Token mixer with a gated delta rule state per value head.

        q, k, v = silu(conv(x W_qkv))
        g = -e^{A_log} softplus(x W_a + dt_bias),        beta = sigmoid(x W_b)
        o = gated_delta_rule(q / |q|, k / |k|, v, g, beta)
        y = (rms_norm(o) * silu(x W_z)) W_o

    A_log and dt_bias ``[HV]`` are float32 and stay so, value for value, when the module is cast to
    a narrower dtype (``.to(torch.bfloat16)``, ``.half()``): a decay rate rounded to 8 bits is
    another model.

    Args:
        hidden_size: width of x and y.
        num_heads: H, heads of q and k.
        num_v_heads: HV, heads of v, a multiple of H; default H.
        head_dim: K.
        head_v_dim: V; default K.
        conv_size: W, tokens that the short convolution sees.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        norm_eps: added to the mean square in the norm of o.
    Raises:
        InvalidInput (a ValueError): a size is no integer of at least 1, or num_v_heads no
            multiple of num_heads.
    Source: Yang et al., arXiv:2412.06464; the gate starts as in Dao and Gu, arXiv:2405.21060.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.hidden_size, self.H, self.K = hidden_size, num_heads, head_dim
        self.HV = num_heads if num_v_heads is None else num_v_heads
        self.V = head_dim if head_v_dim is None else head_v_dim
        self.allow_neg_eigval = allow_neg_eigval
        _check_sizes(hidden_size, self.H, self.HV, self.K, self.V, conv_size)

        channels = 2 * self.H * self.K + self.HV * self.V
        self.qkv_proj = nn.Linear(hidden_size, channels, bias=False)
        self.z_proj = nn.Linear(hidden_size, self.HV * self.V, bias=False)
        self.ab_proj = nn.Linear(hidden_size, 2 * self.HV, bias=False)
        self.conv = ShortConvolution(channels, conv_size)
        self.norm = nn.RMSNorm(self.V, eps=norm_eps)
        self.o_proj = nn.Linear(self.HV * self.V, hidden_size, bias=False)
        # The only parameters that the layer holds itself: `_apply` relies on it.
        self.A_log = nn.Parameter(torch.empty(self.HV, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.HV, dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The gate anew (projections and convolution have their own): e^{A_log} is drawn uniform in
        (0.01, 16) and softplus(dt_bias) log-uniform in (1e-3, 0.1)."""
        self.A_log.uniform_(0.01, 16).log_()
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        initial_state: LayerState | None = None,
        output_final_state: bool = False,
        cp_context: CPContext | None = None,
    ) -> LayerOutput:
        """Mix the tokens of each document.

        Args:
            x: ``[B, T, hidden]``.
            cu_seqlens: ``[N + 1]`` int32 or int64 document boundaries, needs B == 1; None: N = B.
            cu_seqlens_cpu: the same on the CPU; saves their copy to the host.
            initial_state: ``LayerState`` before each document; None is zeros.
            output_final_state: also return the ``LayerState`` after each document.
            cp_context: which ranks hold the rest of each document; x is then this rank's rows, and
                states have a row per document that starts (initial) or ends (final) here.
        Returns:
            ``LayerOutput(y, final_state)``: y like x, zero after the last boundary (for finite x).
        Raises:
            InvalidInput (a ValueError): a shape, dtype, device or offset is wrong.
            NotYet: as ``causal_conv1d``.
        Source: as the class.
        """
        conv_state, S_in = _checked_state(initial_state)
        places = (cu_seqlens, cu_seqlens_cpu)
        operands = self.operands(x, *places, conv_state, output_final_state, cp_context)
        o, final_S = self.mix(operands, *places, S_in, output_final_state, cp_context)
        z = self.z_proj(x).unflatten(-1, (self.HV, self.V))
        y: Tensor = self.o_proj((self.norm(o) * F.silu(z)).flatten(-2))
        if not output_final_state:
            return LayerOutput(y, None)
        assert operands.conv_state is not None
        assert final_S is not None
        return LayerOutput(y, LayerState(operands.conv_state, final_S))

    def operands(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        conv_state: Tensor | None = None,
        output_final_state: bool = False,
        cp_context: CPContext | None = None,
    ) -> Operands:
        """What the op reads of x ``[B, T, hidden]``; arguments and errors as in ``forward``.

        Source: as the class.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            hint = "; unsqueeze a single sequence" if x.dim() == 2 else ""
            raise InvalidInput(
                f"x must be [B, T, hidden={self.hidden_size}]; got {list(x.shape)}{hint}"
            )
        weight = self.qkv_proj.weight
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InvalidInput(
                f"x must have the layer's dtype {weight.dtype}; got {x.dtype}; cast one of the two"
            )
        qkv, conv_state = self.conv(
            self.qkv_proj(x),
            cu_seqlens,
            cu_seqlens_cpu,
            conv_state,
            output_final_state,
            cp_context,
        )
        q, k, v = qkv.split([self.H * self.K, self.H * self.K, self.HV * self.V], dim=-1)
        a, b = self.ab_proj(x).chunk(2, dim=-1)
        return Operands(
            q.unflatten(-1, (self.H, self.K)),
            k.unflatten(-1, (self.H, self.K)),
            v.unflatten(-1, (self.HV, self.V)),
            a,
            b,
            conv_state,
        )

    def mix(
        self,
        operands: Operands,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        S_in: Tensor | None = None,
        output_final_state: bool = False,
        cp_context: CPContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The op on ``operands`` with this layer's gate: o, and S after each document or None.

        Source: as the class.
        """
        o, final_S = chunk_gated_delta_rule(
            operands.q,
            operands.k,
            operands.v,
            operands.a,
            operands.b,
            initial_state=S_in,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            cp_context=cp_context,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        return o, final_S

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDeltaNet:
        """torch moves and casts a module through this. Children as ever; A_log and dt_bias keep 32
        bits, and their values: not through bfloat16 and back."""

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= 4 else tensor.to(moved.device)

        if recurse:
            for child in self.children():
                child._apply(fn)
        super()._apply(keep_wide, recurse=False)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return f"H={self.H}, HV={self.HV}, K={self.K}, V={self.V}"


def _checked_state(state: LayerState | None) -> tuple[Tensor | None, Tensor | None]:
    """Its two tensors, or None twice. A tensor of two rows would unpack as well."""
    if state is None:
        return None, None
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(x, Tensor) for x in state):
        return state
    raise InvalidInput(
        "initial_state must be a LayerState of two tensors, conv and S, or None, "
        f"got {type(state).__name__}; pass the final_state of an earlier call"
    )


def _check_sizes(hidden_size: int, H: int, HV: int, K: int, V: int, W: int) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_heads": H,
        "num_v_heads": HV,
        "head_dim": K,
        "head_v_dim": V,
        "conv_size": W,
    }
    for name, size in sizes.items():
        checked_int(name, size, least=1)
    if HV % H:
        raise InvalidInput(
            f"num_v_heads must be a multiple of num_heads={H}, got {HV}; "
            "each q/k head serves a whole group of value heads"
        )
