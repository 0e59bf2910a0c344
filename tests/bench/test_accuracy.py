"""What is called right, and what is called equal."""

from __future__ import annotations

import pytest
import torch

from longdelta.bench.accuracy import (
    RESULTS,
    cut_cotangent,
    cut_of,
    distance,
    expected,
    fingerprint,
    verdict,
)
from longdelta.bench.baselines import whole_inputs
from longdelta.bench.problem import problem_of
from longdelta.testing.budgets import EAGER, relative_l2

from .scripted import CPU, ROW, arm


def test_fingerprint_is_equal_for_equal_bits_and_different_for_other_bits() -> None:
    x = torch.randn(1000)
    swapped = x[torch.tensor([1, 0, *range(2, 1000)])]
    signed = x.clone()
    signed[5] = 0.0
    assert fingerprint((x, signed)) == fingerprint((x.clone(), signed.clone()))
    assert fingerprint((x,)) != fingerprint((swapped,))
    assert fingerprint((signed,)) != fingerprint((torch.where(signed == 0, -signed, signed),))
    assert fingerprint((x.bfloat16(),)) != fingerprint((x.half(),))


def test_fingerprint_reads_values_not_strides() -> None:
    x = torch.randn(4, 6)
    assert fingerprint((x.t(),)) == fingerprint((x.t().contiguous(),))


def test_distance_is_the_relative_l2_error_and_infinite_for_nan() -> None:
    x, y = torch.randn(50), torch.randn(50)
    assert abs(distance(x, y) - relative_l2(x, y)) < EAGER[torch.float64]
    assert distance(y, y) == 0.0
    assert distance(torch.full((3,), float("nan")), torch.ones(3)) == float("inf")


def test_cut_takes_the_first_tokens_of_the_first_and_the_longest_document() -> None:
    assert cut_of(ROW, tokens=30).rows == ((0, 30),)
    cut = cut_of(ROW.__class__("two", 4, 8, (5, 90, 40)), tokens=30)
    assert cut.rows == ((0, 5), (5, 35))
    assert cut.heads == (0, 3)
    assert cut.offsets() == [0, 5, 35]


@pytest.mark.parametrize("tokens", [7, 70])
def test_whole_run_with_a_cut_cotangent_gives_the_gradients_of_the_cut_alone(tokens: int) -> None:
    problem, cut = problem_of(ROW, CPU), cut_of(ROW, tokens)
    runner = arm("ours").build(problem)
    leaves = whole_inputs(problem, runner)
    o = runner.op(*leaves)
    found = (o.detach(), *torch.autograd.grad(o, leaves, cut_cotangent(problem, cut)))
    for name, x, ref in zip(RESULTS, found, expected(problem, cut, True), strict=True):
        assert distance(cut.of(x, ROW), ref) < EAGER[torch.float32], name


def test_verdict_names_what_is_wrong_and_leaves_dg_out_under_strong_gates() -> None:
    errors = {"o": 1e-3, "dq": 0.4, "dg": 0.5}
    assert verdict(errors, "mild") == "wrong against float64: dq 4.0e-01, dg 5.0e-01 (limit 0.03)"
    assert "dg" not in verdict(errors, "strong")
    assert verdict({"o": 1e-3, "dg": 5e-3}, "mild") == ""
    assert verdict({"o": float("nan")}, "mild")
