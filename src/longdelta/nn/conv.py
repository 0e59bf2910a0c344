"""Short causal convolution over packed documents, in vectorised torch.

The one idea: every document gets W - 1 rows of history in front (its initial state, or zeros), so
a convolution over the extended rows never mixes documents, however short they are:

    rows      a0 a1 | b0 b1 b2 | rest          extended   h h h a0 a1 h h h b0 b1 b2 h h h rest

The rows after the last boundary are one more document, which is cleared. Row r of document d sits
at r + (d + 1)(W - 1), the first of its W taps at r + d (W - 1).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from longdelta.distributed.context import CPContext
from longdelta.distributed.conv_halo import document_ends, fragment_history
from longdelta.errors import InvalidInput
from longdelta.ops.plans import check_offsets, host_offsets


class ConvOutput(NamedTuple):
    """``y`` like x; ``final_state`` ``[N, D, W - 1]``, or None where it was not asked for."""

    y: Tensor
    final_state: Tensor | None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cp_context: CPContext | None = None,
) -> ConvOutput:
    """Depthwise causal convolution along the tokens of each document, with optional SiLU.

    Per document and channel, with x_t = initial_state for -(W - 1) <= t < 0 (zero if None):

        y_t = act(bias + sum_{j=0}^{W-1} weight[W - 1 - j] x_{t-j})

    Computed in float32 (float64 if an argument is float64), rounded once to x's dtype. Rows after
    the last boundary give zero output and zero gradients, whatever they hold. Differentiable in x,
    weight, bias and initial_state.

    Args:
        x: ``[B, T, D]`` or ``[T, D]``, any float dtype; strided views are read correctly.
        weight: ``[D, W]``, W >= 1; its last column meets the present token.
        bias: ``[D]`` or None.
        activation: None or "silu".
        cu_seqlens: ``[N + 1]`` int32 or int64 token offsets on x's device or the CPU, needs
            B == 1; repeats mark empty documents. None: each of the B rows is one document, N = B.
        cu_seqlens_cpu: the same offsets on the CPU, with it or alone; saves the copy to the host.
        initial_state: ``[N, D, W - 1]``, the tokens before each document, oldest first.
        output_final_state: also return the last W - 1 tokens of each document and its history,
            oldest first, in the wider dtype of x and initial_state.
        cp_context: which ranks hold the rest of each document
            (``longdelta.distributed.build_cp_context``); then x is ``[1, rows, D]`` of this rank,
            the boundaries are the context's, and states have one row per document that starts
            (initial) or ends (final) on this rank.
    Returns:
        ``(y, final_state)``: y like x; final_state ``[N, D, W - 1]`` or None.
    Raises:
        InvalidInput (a ValueError): a shape, dtype, device, offset or option is wrong (the values
            of offsets are trusted inside torch.compile).
        NotYet: initial_state with a document that a rank border cuts within its first W - 1 tokens.
    Source: own; the short convolution of Yang et al., arXiv:2412.06464, section 3.4.
    """
    _check_operands(x, weight, bias, activation)
    if cp_context is not None:
        return _across_ranks(
            x, weight, bias, activation, initial_state, output_final_state, cp_context
        )
    cu_seqlens = cu_seqlens_cpu if cu_seqlens is None else cu_seqlens
    N = _check_documents(x, cu_seqlens, cu_seqlens_cpu)
    if cu_seqlens_cpu is not None and cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        cu_seqlens = cu_seqlens_cpu  # the one that was checked
    _check_state(x, weight, N, initial_state)
    state_dtype = x.dtype if initial_state is None else _wider(x.dtype, initial_state.dtype)
    compute = _wider(_wider(state_dtype, weight.dtype), torch.float32)

    rows_BTD = (x if x.dim() == 3 else x.unsqueeze(0)).to(compute)
    if initial_state is None:
        history_NWD = rows_BTD.new_zeros(N, weight.shape[1] - 1, weight.shape[0])
    else:
        history_NWD = initial_state.to(compute).mT
    convolve = _one_document_a_row if cu_seqlens is None else _packed_documents
    y, last_NWD = convolve(rows_BTD, history_NWD, weight.to(compute), bias, cu_seqlens)
    y = _silu(y) if activation == "silu" else y
    return ConvOutput(
        y.to(x.dtype).view(x.shape),
        last_NWD.mT.to(state_dtype).contiguous() if output_final_state else None,
    )


class ShortConvolution(nn.Module):
    """Holds the ``weight`` [D, W] of ``causal_conv1d`` with SiLU; no bias.

    Args:
        channels: D.
        size: W, tokens seen, the present one included.
    Source: as ``causal_conv1d``.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight uniform in +-W^{-1/2}."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cp_context: CPContext | None = None,
    ) -> ConvOutput:
        """``causal_conv1d(x, weight, activation="silu")``, shapes as there."""
        return causal_conv1d(
            x,
            self.weight,
            activation="silu",
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cp_context=cp_context,
        )


def _across_ranks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Literal["silu"] | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cp_context: CPContext,
) -> ConvOutput:
    """Each fragment of a document with the tokens before it, from whichever ranks hold them."""
    if not isinstance(cp_context, CPContext):
        raise InvalidInput(
            "cp_context must come from longdelta.distributed.build_cp_context; got "
            f"{type(cp_context).__name__}"
        )
    if x.dim() != 3 or x.shape[:2] != (1, cp_context.rows):
        raise InvalidInput(
            f"x must be [1, {cp_context.rows}, D], the rows of rank {cp_context.rank} of this "
            f"cp_context, got {_came(x)}; see cp_context.shard"
        )
    _check_state(x, weight, len(cp_context.starts), initial_state)
    y, last = causal_conv1d(
        x,
        weight,
        bias,
        activation=activation,
        cu_seqlens=cp_context.cu_seqlens_on(x.device),
        cu_seqlens_cpu=cp_context.cu_seqlens,
        initial_state=fragment_history(x[0], weight.shape[1], initial_state, cp_context),
        output_final_state=output_final_state,
    )
    return ConvOutput(y, None if last is None else document_ends(last, cp_context))


def _silu(y: Tensor) -> Tensor:
    """F.silu rounds the last few entries of a tensor otherwise than the rest; this does not. The
    clamp keeps the gradient finite; below it the result is zero to every digit."""
    return y / (1 + torch.exp(-y.clamp_min(-80.0)))


def _taps(extended_BTD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y[t] = bias + sum_j weight[:, j] extended[t + j]: W - 1 rows fewer than it reads."""
    W = weight.shape[1]
    tokens = extended_BTD.shape[1] - (W - 1)
    y = extended_BTD[:, :tokens] * weight[:, 0]
    for j in range(1, W):
        y = y + extended_BTD[:, j : j + tokens] * weight[:, j]
    return y if bias is None else y + bias.to(y.dtype)


def _one_document_a_row(
    rows_BTD: Tensor, history_NWD: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor | None
) -> tuple[Tensor, Tensor]:
    extended = torch.cat([history_NWD, rows_BTD], dim=1)
    return _taps(extended, weight, bias), extended[:, rows_BTD.shape[1] :]


def _packed_documents(
    rows_BTD: Tensor,
    history_NWD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    assert cu_seqlens is not None
    rows = rows_BTD[0]
    N, halo, D = history_NWD.shape
    offsets = cu_seqlens.to(rows.device, torch.int64)
    row = torch.arange(rows.shape[0], device=rows.device)
    document = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    held = (document < N).unsqueeze(1)
    first_tap = row + document * halo
    within = torch.arange((N + 1) * halo, device=rows.device).view(N + 1, halo)
    history = torch.cat([history_NWD, history_NWD.new_zeros(1, halo, D)]).flatten(0, 1)
    # The rest is cleared before and after, so that not even a NaN leaves or enters it.
    extended = rows.new_zeros(rows.shape[0] + (N + 1) * halo, D)
    extended = extended.index_copy(0, first_tap + halo, torch.where(held, rows, 0))
    extended = extended.index_copy(0, (offsets[:, None] + within).flatten(), history)
    y = _taps(extended.unsqueeze(0), weight, bias)[0].index_select(0, first_tap)
    last = extended.index_select(0, (offsets[1:, None] + within[:N]).flatten())
    return torch.where(held, y, 0).unsqueeze(0), last.view(N, halo, D)


def _wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return torch.promote_types(a, b)


def _check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    if x.dim() not in (2, 3) or not x.is_floating_point():
        raise InvalidInput(
            f"x must be [B, T, D] or [T, D] of a float dtype, got {_came(x)}; "
            "add or merge dimensions first"
        )
    D = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise InvalidInput(
            f"weight must be [D={D}, W] with W >= 1, got {_came(weight)}; "
            "squeeze the middle dimension of a Conv1d weight"
        )
    if bias is not None and bias.shape != (D,):
        raise InvalidInput(f"bias must be [D={D}] or None, got {_came(bias)}; pass one per channel")
    if activation not in (None, "silu"):
        raise InvalidInput(f'activation must be None or "silu", got {activation!r}; choose one')
    for name, tensor in (("weight", weight), ("bias", bias)):
        _check_kind(name, tensor, x)


def _check_state(x: Tensor, weight: Tensor, N: int, initial_state: Tensor | None) -> None:
    D, W = weight.shape
    if initial_state is not None and initial_state.shape != (N, D, W - 1):
        raise InvalidInput(
            f"initial_state must be [N={N}, D={D}, W-1={W - 1}], got {_came(initial_state)}; "
            "pass one state per document, its oldest token first"
        )
    _check_kind("initial_state", initial_state, x)


def _check_documents(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> int:
    """Returns N."""
    B, T = (1, x.shape[0]) if x.dim() == 2 else x.shape[:2]
    if cu_seqlens is None:
        return B
    if B != 1:
        raise InvalidInput(f"x must have B == 1 with cu_seqlens, got B={B}; pack its rows into one")
    cpu = torch.device("cpu")
    for name, tensor, devices in (
        ("cu_seqlens", cu_seqlens, (x.device, cpu)),
        ("cu_seqlens_cpu", cu_seqlens_cpu, (cpu,)),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise InvalidInput(
                f"{name} must be [N + 1] int32 or int64, got {type(tensor).__name__}; "
                "torch.tensor(...) makes a tensor of a list"
            )
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            raise InvalidInput(f"{name} must be [N + 1] int32 or int64, got {_came(tensor)}")
        if tensor.shape[0] != max(1, cu_seqlens.shape[0]) or tensor.device not in devices:
            raise InvalidInput(
                f"{name} must hold N + 1 offsets on {devices[0]}, got {_came(tensor)}; "
                "use [0] for no document"
            )
    bounds = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    # A traced or fake tensor has no content to check.
    if not torch.compiler.is_compiling() and type(bounds) is Tensor and not bounds.is_meta:
        check_offsets(host_offsets(bounds), T)
    return cu_seqlens.shape[0] - 1


def _check_kind(name: str, tensor: Tensor | None, x: Tensor) -> None:
    if tensor is not None and (tensor.device != x.device or not tensor.is_floating_point()):
        raise InvalidInput(
            f"{name} must be of a float dtype on {x.device} like x, got {_came(tensor)}; move it"
        )


def _came(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
