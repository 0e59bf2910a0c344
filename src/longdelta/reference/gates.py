"""The decay gate of a layer and the norm of its queries and keys."""

from typing import NamedTuple

import torch
from torch import Tensor


def gate(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Log decay of every token and value head, from the layer's projection and two parameters.

        g = -e^{A_log} softplus(a + dt_bias),        softplus(x) = log(1 + e^x)

    Args:
        a: ``[..., HV]``, the projection of the token.
        A_log: ``[HV]``, log of the decay rate.
        dt_bias: ``[HV]``, shift of the step size.

    Returns:
        ``[..., HV]`` float64, natural log per token, at most 0.

    Source: arXiv:2412.06464.

    >>> gate(torch.zeros(1), torch.zeros(1), torch.zeros(1)).exp()  # e^{-log 2}
    tensor([0.5000], dtype=torch.float64)
    """
    x = a.double() + dt_bias.double()
    # logaddexp and not torch's softplus, which returns x itself above 20: an error of 1e-10.
    return -A_log.double().exp() * torch.logaddexp(x, torch.zeros_like(x))


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the length of the last dimension.

        y = x / sqrt(sum x^2 + eps)

    Args:
        x: ``[..., K]``.
        eps: added to the squared length, so that a zero vector stays zero.

    Returns:
        ``[..., K]`` float64.

    Source: arXiv:2412.06464.

    >>> l2norm(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.6000, 0.8000], dtype=torch.float64)
    """
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


class Activated(NamedTuple):
    """What the rule takes: q, k ``[T, H, K]``, g, beta ``[T, HV]``, float64."""

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor


def activate(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    neg_eigval: bool = False,
) -> Activated:
    """A layer's projections as the rule takes them.

        l2norm(q)    l2norm(k)    gate(a, A_log, dt_bias)    beta = top / (1 + e^{-b})

    Args:
        q, k: ``[T, H, K]``.
        a, b: ``[T, HV]``, the projections of gate and beta.
        A_log, dt_bias: ``[HV]``, as in `gate`.
        neg_eigval: top = 2, so that I - beta k^T k may turn a vector around; else 1.

    Returns:
        ``Activated(q, k, g, beta)``.

    Source: arXiv:2412.06464; for beta up to 2 arXiv:2411.12537.

    >>> x = torch.zeros(1, 1, 2)
    >>> activate(x, x, x[0], x[0], torch.zeros(2), torch.zeros(2)).beta
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    beta = (2 if neg_eigval else 1) * torch.sigmoid(b.double())
    return Activated(l2norm(q), l2norm(k), gate(a, A_log, dt_bias), beta)


class RawGradients(NamedTuple):
    """Of a layer's projections and parameters: like these, float64."""

    dq: Tensor
    dk: Tensor
    da: Tensor
    db: Tensor
    dA_log: Tensor
    ddt_bias: Tensor


def adjoint_activate(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cotangents: Activated,
    *,
    neg_eigval: bool = False,
) -> RawGradients:
    """The way back through `activate`.

        dq = (dy - <dy, y> y) / |q|, y = q / |q|        da = -e^{A_log} sigmoid(a + dt_bias) dg
        dA_log = sum_t g dg        ddt_bias = sum_t da
        db = top s (1 - s) dbeta, s = sigmoid(b)

    Args:
        q, k, a, b, A_log, dt_bias, neg_eigval: as in `activate`.
        cotangents: of what it gives.

    Returns:
        ``RawGradients(dq, dk, da, db, dA_log, ddt_bias)``.

    Source: this project; autograd of `activate` agrees.

    >>> x = torch.zeros(1, 1, 2)
    >>> ones = Activated(x + 1, x + 1, x[0] + 1, x[0] + 1)
    >>> adjoint_activate(x, x, x[0], x[0], torch.zeros(2), torch.zeros(2), ones).db
    tensor([[0.2500, 0.2500]], dtype=torch.float64)
    """

    def through_norm(x: Tensor, dy: Tensor) -> Tensor:
        x, dy, y = x.double(), dy.double(), l2norm(x)
        length = (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return (dy - (dy * y).sum(-1, keepdim=True) * y) / length

    dg, dbeta = cotangents.g.double(), cotangents.beta.double()
    da = -A_log.double().exp() * torch.sigmoid(a.double() + dt_bias.double()) * dg
    s = torch.sigmoid(b.double())
    return RawGradients(
        dq=through_norm(q, cotangents.q),
        dk=through_norm(k, cotangents.k),
        da=da,
        db=(2 if neg_eigval else 1) * s * (1 - s) * dbeta,
        dA_log=(gate(a, A_log, dt_bias) * dg).sum(0),
        ddt_bias=da.sum(0),
    )
