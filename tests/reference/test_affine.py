"""Maps of the state: composition is application in turn, transposition is the adjoint."""

import torch

from longdelta.reference import AffineMap, apply, compose, identity, transpose
from longdelta.testing.budgets import FLOAT64, assert_within


def _random(seed):
    random = torch.Generator().manual_seed(seed)
    step = AffineMap(
        torch.randn(3, 4, 4, generator=random, dtype=torch.float64),
        torch.randn(3, 4, 5, generator=random, dtype=torch.float64),
    )
    return step, torch.randn(3, 4, 5, generator=random, dtype=torch.float64)


def test_apply_multiplies_before_it_adds():
    step = AffineMap(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[10.0], [20.0]]))
    assert apply(step, torch.tensor([[3.0], [4.0]])).tolist() == [[14.0], [26.0]]


def test_compose_applies_the_earlier_map_first():
    (later, _), (earlier, S) = _random(0), _random(1)
    in_turn = apply(later, apply(earlier, S))
    assert_within("state", apply(compose(later, earlier), S), in_turn, FLOAT64)


def test_compose_leaves_a_map_unchanged_beside_the_identity():
    step = AffineMap(*(x[0] for x in _random(2)[0]))
    for both in (compose(step, identity(4, 5)), compose(identity(4, 5), step)):
        assert torch.equal(both.M, step.M)
        assert torch.equal(both.B, step.B)


def test_transpose_matches_autograd_of_apply():
    (step, S), (_, dS) = _random(3), _random(4)
    S.requires_grad_()
    (expected,) = torch.autograd.grad(apply(step, S), S, dS)
    assert_within("cotangent", apply(transpose(step), dS), expected, FLOAT64)


def test_transpose_adds_what_the_outputs_of_the_run_send():
    (step, dB), (_, dS) = _random(5), _random(6)
    assert_within("cotangent", apply(transpose(step, dB), dS), step.M.mT @ dS + dB, FLOAT64)


def test_transpose_of_a_composition_composes_in_the_other_order():
    (later, _), (earlier, dS) = _random(7), _random(8)
    whole = apply(transpose(compose(later, earlier)), dS)
    in_turn = apply(transpose(earlier), apply(transpose(later), dS))
    assert_within("cotangent", whole, in_turn, FLOAT64)
