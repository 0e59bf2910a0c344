"""The gate of a layer and the norm of q and k."""

import math

import pytest
import torch

from longdelta.reference import Activated, activate, adjoint_activate, gate, l2norm
from longdelta.testing.budgets import FLOAT64, assert_within


def test_gate_is_the_rate_times_the_softplus_of_the_shifted_projection():
    a = torch.tensor([[0.3, -2.0], [1.0, 0.0]], dtype=torch.float64)
    A_log, dt_bias = torch.tensor([0.0, 2.5]), torch.tensor([0.5, -1.0])
    expected = torch.tensor(
        [
            [-math.log1p(math.exp(0.8)), -math.exp(2.5) * math.log1p(math.exp(-3.0))],
            [-math.log1p(math.exp(1.5)), -math.exp(2.5) * math.log1p(math.exp(-1.0))],
        ],
        dtype=torch.float64,
    )
    assert_within("g", gate(a, A_log, dt_bias), expected, FLOAT64)


def test_gate_keeps_every_digit_above_the_threshold_of_the_usual_softplus():
    excess = -gate(torch.tensor([21.0]), torch.zeros(1), torch.zeros(1)) - 21
    assert 7.5e-10 < excess.item() < 7.7e-10  # e^-21 = 7.58e-10


def test_gate_has_finite_gradients_at_both_ends():
    a = torch.tensor([-800.0, 800.0], dtype=torch.float64, requires_grad=True)
    (da,) = torch.autograd.grad(gate(a, torch.zeros(2), torch.zeros(2)).sum(), a)
    assert da.tolist() == [0.0, -1.0]


def test_l2norm_gives_unit_rows_and_keeps_a_zero_row_at_zero():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    expected = torch.tensor([[0.6, 0.8], [0.0, 0.0]], dtype=torch.float64)
    assert_within("y", l2norm(x, eps=0.0)[:1], expected[:1], FLOAT64)
    assert torch.equal(l2norm(x)[1], expected[1])


def test_l2norm_adds_eps_to_the_squared_length():
    y = l2norm(torch.tensor([3.0, 4.0]), eps=11.0)
    assert_within("y", y, torch.tensor([0.5, 4 / 6], dtype=torch.float64), FLOAT64)


@pytest.mark.parametrize("neg_eigval", [False, True])
def test_adjoint_activate_agrees_with_autograd(neg_eigval):
    T, H, HV, K = 5, 2, 4, 6
    shapes = ((T, H, K), (T, H, K), (T, HV), (T, HV), (HV,), (HV,))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    cotangents = Activated(*(torch.randn(s, dtype=torch.float64) for s in shapes[:4]))
    expected = torch.autograd.grad(activate(*leaves, neg_eigval=neg_eigval), leaves, cotangents)
    with torch.no_grad():
        found = adjoint_activate(*leaves, cotangents, neg_eigval=neg_eigval)
    for name, x, y in zip(found._fields, found, expected, strict=True):
        assert_within(name, x, y, FLOAT64)
