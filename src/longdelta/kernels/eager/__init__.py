"""The stages in vectorised torch: any device, any K and V; float32 arithmetic, or float64.

Note [Bits]: the results of one chunk and head must not depend on what else is in the batch, nor on
the number of threads. Batched matrix products, sums over the last axis, exp, log1p and sqrt have
that property on CPU for contiguous operands; sigmoid, softplus and exp2 do not, and are not used.
So every operand is gathered into contiguous chunks and cast first.
"""

from longdelta.kernels.eager.activate import activate, adjoint_activate
from longdelta.kernels.eager.adjoint_scan import adjoint_scan
from longdelta.kernels.eager.adjoint_summarize import adjoint_summarize
from longdelta.kernels.eager.fold import adjoint_fold, fold
from longdelta.kernels.eager.gradients import gradients
from longdelta.kernels.eager.prepare import prepare
from longdelta.kernels.eager.scan import scan
from longdelta.kernels.eager.summarize import summarize

__all__ = [
    "activate",
    "adjoint_activate",
    "adjoint_fold",
    "adjoint_scan",
    "adjoint_summarize",
    "fold",
    "gradients",
    "prepare",
    "scan",
    "summarize",
]
