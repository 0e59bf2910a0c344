"""Affine maps of the state: how a run of tokens carries S across.

Over any run of tokens the state that leaves is an affine function of the state that enters,

    S_out = M S_in + B,        M in R^{K x K},  B in R^{K x V},

and the cotangents run through the transpose of the same M, from the end to the start.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AffineMap(NamedTuple):
    """The map S -> M S + B.

    M: ``[..., K, K]``; B: ``[..., K, V]``.
    """

    M: Tensor
    B: Tensor


def identity(K: int, V: int) -> AffineMap:
    """The map of no tokens at all: S -> S.

    Args:
        K, V: key and value dimension of the state.

    Returns:
        An ``AffineMap`` of float64 tensors ``[K, K]`` and ``[K, V]``.
    """
    eye = torch.eye(K, dtype=torch.float64)
    return AffineMap(eye, torch.zeros(K, V, dtype=torch.float64))


def apply(step: AffineMap, S: Tensor) -> Tensor:
    """Send a state through a map: M S + B.

    Args:
        step: the map.
        S: ``[..., K, V]``, the state that enters.

    Returns:
        ``[..., K, V]``, the state that leaves.

    >>> double = AffineMap(2 * torch.eye(1), torch.ones(1, 1))
    >>> apply(double, torch.tensor([[3.0]]))
    tensor([[7.]])
    """
    return step.M @ S + step.B


def compose(later: AffineMap, earlier: AffineMap) -> AffineMap:
    """One map for two runs of tokens, the earlier run first.

        M = M_later M_earlier,        B = M_later B_earlier + B_later

    Args:
        later, earlier: the maps of the second and of the first run.

    Returns:
        The map of both.

    >>> double = AffineMap(2 * torch.eye(1), torch.ones(1, 1))
    >>> apply(compose(double, double), torch.tensor([[3.0]]))
    tensor([[15.]])
    """
    return AffineMap(later.M @ earlier.M, apply(later, earlier.B))


def transpose(step: AffineMap, dB: Tensor | None = None) -> AffineMap:
    """The map of the cotangents, dS_out -> dS_in = M^T dS_out + dB.

    The linear part is the forward's, transposed. The offset is not a function of the forward's
    offset: it is what the outputs of the run add to the cotangent.

    Args:
        step: the forward map of the run.
        dB: ``[..., K, V]``, what the run's own outputs send to its start; None is zero.

    Returns:
        The adjoint map.
    """
    return AffineMap(step.M.mT, torch.zeros_like(step.B) if dB is None else dB)
