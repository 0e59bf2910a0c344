"""The stages for Hopper GPUs (sm_90a), bf16 q, k, v and K = V = 128, in Gluon.

The forward stages are kernels. The adjoint stages are the eager ones on the tensors of this
backend, widened to float32: right, and slow.
"""

from longdelta.kernels.gluon.activate import activate
from longdelta.kernels.gluon.adjoint import adjoint_scan, adjoint_summarize, gradients
from longdelta.kernels.gluon.fold import adjoint_fold, fold
from longdelta.kernels.gluon.prepare import prepare
from longdelta.kernels.gluon.scan import scan
from longdelta.kernels.gluon.summarize import summarize

__all__ = [
    "activate",
    "adjoint_fold",
    "adjoint_scan",
    "adjoint_summarize",
    "fold",
    "gradients",
    "prepare",
    "scan",
    "summarize",
]
