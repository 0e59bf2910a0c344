"""States as callers hand them over."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(state: Tensor | None) -> tuple[Tensor | None, bool]:
    """An fp32 state whose memory is [., HV, K, V] or [., HV, V, K], and whether it is the latter."""
    if state is None:
        return None, False
    if state.dtype != torch.float32:
        state = state.float()
    if state.transpose(-1, -2).is_contiguous() and not state.is_contiguous():
        return state, True
    return state.contiguous(), False
