"""The stages for Hopper GPUs (sm_90a), bf16 q, k, v and K = V = 128, in Gluon."""

from longdelta.kernels.gluon.activate import activate
from longdelta.kernels.gluon.adjoint_activate import adjoint_activate
from longdelta.kernels.gluon.adjoint_scan import adjoint_scan
from longdelta.kernels.gluon.adjoint_summarize import adjoint_summarize
from longdelta.kernels.gluon.fold import adjoint_fold, fold
from longdelta.kernels.gluon.gradients import gradients
from longdelta.kernels.gluon.prepare import prepare
from longdelta.kernels.gluon.scan import scan
from longdelta.kernels.gluon.summarize import summarize

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
