"""Every tolerance of the project, as a relative L2 error ||out - ref|| / ||ref|| against float64.

FLOAT64 holds for anything computed in float64. The others are for results that come back in the
dtype of the inputs: the eager backend computes in float32, so that the last rounding dominates
(half an ulp is 2^-9 relative in bfloat16, 2^-12 in float16; its rms is about half of that), and
gradients of a float32 call carry the sums of a few hundred rounded terms. float32 allows for gates:
their sum in a chunk is held in float32, and where it reaches a few hundred, as in heads that forget
within a few tokens, its rounding (ulp(512) / 2 is 3e-5) is the relative error of a decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

Budgets: TypeAlias = Mapping[str | torch.dtype, float]
"""By the dtype of a result, or by its name."""

FLOAT64 = 1e-10
EAGER: Budgets = {
    torch.float64: FLOAT64,
    torch.float32: 5e-5,
    torch.float16: 5e-4,
    torch.bfloat16: 3e-3,
}
"""Budget of every output and gradient of the eager backend, by the dtype of the result."""

HOPPER: Budgets = {
    "o": 4.5e-3,
    "final_state": 4e-3,
    "dq": 6e-3,
    "dk": 6e-3,
    "dv": 6e-3,
    "dg": 8e-3,
    "dbeta": 8e-3,
    "d_initial_state": 6e-3,
    "dA_log": 8e-3,
    "ddt_bias": 8e-3,
    "G": 1e-6,
    "Z": 1e-3,
    "bound": 1e-3,
    "S_ext": 4e-3,
    "M": 5e-3,
    "M_bound": 1e-3,
    "S_border": 1e-4,
    "S": 4e-3,
    "Uh": 4e-3,
    "dS_ext": 4e-3,
    "dS_border": 1e-4,
    "dS": 4e-3,
    "dR": 4e-3,
}
"""Of the Hopper kernels, whose products have bf16 operands: results of the op, of a stage alone."""
HOPPER_LARGE_INVERSE: Budgets = {name: 2 * budget for name, budget in HOPPER.items()} | {
    "o": 8e-3,
    "final_state": 7e-3,
}
"""Where keys are close to each other and beta is close to 1, or some beta is above 1."""
HOPPER_REFLECTIONS: Budgets = {name: 4 * budget for name, budget in HOPPER.items()}
"""Where beta is close to 2: no state shrinks, and the errors of thousands of tokens add up."""


def budget(budgets: Budgets, name: str, dtype: torch.dtype) -> float:
    """Of a result, by its name or its dtype."""
    return budgets[name] if name in budgets else budgets[dtype]


def relative_l2(out: torch.Tensor, ref: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """||out - ref|| / ||ref|| in float64; `scale`, if given, takes ref's place below the line.

    NaN in `out` never passes: the result is then infinite. Both zero count as equal.
    """
    out, ref = out.detach().double().cpu(), ref.detach().double().cpu()
    if out.shape != ref.shape:
        raise AssertionError(f"shapes differ: {tuple(out.shape)} and {tuple(ref.shape)}")
    error = (out - ref).norm().item()
    size = (ref if scale is None else scale.detach().double().cpu()).norm().item()
    if error == 0.0:
        return 0.0
    return error / size if size > 0 and error == error else float("inf")


def assert_within(
    name: str,
    out: torch.Tensor,
    ref: torch.Tensor,
    budget: float,
    scale: torch.Tensor | None = None,
) -> None:
    """Fails with the name and both figures where the relative L2 error exceeds the budget."""
    error = relative_l2(out, ref, scale)
    assert error <= budget, f"{name}: relative L2 error {error:.3e} exceeds its budget {budget:.1e}"
