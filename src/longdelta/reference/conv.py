"""Short causal depthwise convolution over packed documents."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class ConvResult(NamedTuple):
    """y: ``[T, D]``; final_state: ``[N, D, W-1]``, the last W-1 inputs of every document."""

    y: Tensor
    final_state: Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | None = None,
    activation: Literal["silu"] | None = None,
    initial_state: Tensor | None = None,
) -> ConvResult:
    """Filter every channel with its own W taps; no document sees its neighbour.

        y_t = f( bias + sum_{j<W} weight[:, W-1-j] x_{t-j} ),        f = identity or silu

    An x before the document's first token is read from ``initial_state``.

    Args:
        x: ``[T, D]``, packed.
        weight: ``[D, W]``; the last column meets the token itself.
        bias: ``[D]`` or None for zero.
        cu_seqlens: ``N + 1`` boundaries; None is one document. Rows after the last one give zero.
        activation: ``"silu"`` or None.
        initial_state: ``[N, D, W-1]``, the inputs before each document, oldest first; None is zero.

    Returns:
        ``ConvResult(y, final_state)``, float64 and differentiable. ``final_state`` is the
        ``initial_state`` with which a document's continuation has to start.

    Source: arXiv:2412.06464 (the layer's short convolution).

    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> causal_conv1d(x, torch.tensor([[10.0, 1.0]]), cu_seqlens=[0, 2, 3]).y.flatten().tolist()
    [1.0, 12.0, 3.0]
    """
    T, D = x.shape
    W = weight.shape[1]
    x, taps = x.double(), weight.double().T
    bounds = [0, T] if cu_seqlens is None else list(cu_seqlens)
    N = len(bounds) - 1
    before = x.new_zeros(N, D, W - 1) if initial_state is None else initial_state.double()

    y = [x.new_zeros(0, D)]
    final_state = [x.new_zeros(0, D, W - 1)]
    for n, (begin, end) in enumerate(pairwise(bounds)):
        history = torch.cat([before[n].T, x[begin:end]])  # row t + W - 1 is token t
        for t in range(end - begin):
            y_t = (taps * history[t : t + W]).sum(0, keepdim=True)
            y_t = y_t if bias is None else y_t + bias.double()
            y.append(y_t * y_t.sigmoid() if activation == "silu" else y_t)
        final_state.append(history[end - begin :].T[None])
    y.append(x.new_zeros(T - bounds[-1], D))
    return ConvResult(torch.cat(y), torch.cat(final_state))
