"""The backward's stages: the eager ones, on this backend's tensors made float32.

adjoint_summarize.py, adjoint_scan.py and gradients.py hold kernels for them, which are compiled by
the compile gate, and whose rounding was modelled on a CPU, but which have not run on a GPU yet.
Until they have, and are right there, nothing calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# Before this package binds the stages' names: a later import would put modules in their places.
import longdelta.kernels.gluon.adjoint_scan
import longdelta.kernels.gluon.adjoint_summarize
import longdelta.kernels.gluon.gradients  # noqa: F401
from longdelta.kernels import eager


def _widened(stage: Callable[..., None]) -> Callable[..., None]:
    """The stage in float32 on the numbers that the kernels took, tapes and all."""

    def run(*arguments: Any, **outputs: Tensor | None) -> None:
        wide = [x.float() if isinstance(x, Tensor) else x for x in arguments]
        held = {n: x if x is None or x.itemsize > 2 else x.float() for n, x in outputs.items()}
        stage(*wide, **held)
        for name, x in outputs.items():
            if x is not None and x is not held[name]:
                x.copy_(held[name])

    return run


adjoint_summarize = _widened(eager.adjoint_summarize)
adjoint_scan = _widened(eager.adjoint_scan)
gradients = _widened(eager.gradients)
