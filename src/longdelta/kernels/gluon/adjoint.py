"""The stages that have no kernel yet: the eager ones, on this backend's tensors made float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longdelta.kernels import eager


def _widened(stage: Callable[..., None]) -> Callable[..., None]:
    """The stage with its 16-bit inputs, q, k, v and tapes alike, in float32."""

    def run(*arguments: Any, **outputs: Any) -> None:
        wide = [x.float() if isinstance(x, Tensor) else x for x in arguments]
        stage(*wide, **outputs)

    return run


adjoint_summarize = _widened(eager.adjoint_summarize)
adjoint_scan = _widened(eager.adjoint_scan)
gradients = _widened(eager.gradients)
