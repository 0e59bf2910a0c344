"""The mathematics, written as plainly as possible: float64, CPU, loops, torch only.

Everything else in the package is checked against these functions; they are checked against each
other, against autograd and against finite differences. They import nothing of longdelta and share
no code with any backend. ``docs/math.md`` has the same formulas in prose.

    recurrence   the definition, token by token, and its hand-written adjoint
    chunked      the stages: prepare, summarize, fold, scan and adjoint_summarize, adjoint_scan,
                 gradients
    affine       the maps S -> M S + B by which a state crosses a border
    conv         the short causal convolution in front of q, k and v
    gates        how a layer makes g and beta from its projections, and the norm of q and k; the way
                 back

Every function takes one packed batch (no batch dimension), converts it to float64 and trusts it:
shapes are the caller's duty.
"""

from longdelta.reference.affine import AffineMap, apply, compose, identity, transpose
from longdelta.reference.chunked import chunked_backward, chunked_forward
from longdelta.reference.conv import ConvResult, causal_conv1d
from longdelta.reference.gates import (
    Activated,
    RawGradients,
    activate,
    adjoint_activate,
    gate,
    l2norm,
)
from longdelta.reference.recurrence import (
    Gradients,
    RecurrenceResult,
    recurrence,
    recurrence_gradients,
)

__all__ = [
    "Activated",
    "AffineMap",
    "ConvResult",
    "Gradients",
    "RawGradients",
    "RecurrenceResult",
    "activate",
    "adjoint_activate",
    "apply",
    "causal_conv1d",
    "chunked_backward",
    "chunked_forward",
    "compose",
    "gate",
    "identity",
    "l2norm",
    "recurrence",
    "recurrence_gradients",
    "transpose",
]
