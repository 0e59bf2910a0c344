"""The short convolution: by hand, against torch's, across documents and states."""

import pytest
import torch

from longdelta.reference import causal_conv1d
from longdelta.testing.budgets import FLOAT64, assert_within


def _inputs(T=11, D=3, W=4, N=1):
    random = torch.Generator().manual_seed(3)
    shapes = [(T, D), (D, W), (D,), (N, D, W - 1)]
    return [torch.randn(*s, generator=random, dtype=torch.float64) for s in shapes]


def test_causal_conv1d_weighs_the_token_itself_with_the_last_column():
    x = torch.tensor([[1.0], [2.0], [3.0]])
    state = torch.tensor([[[7.0, 9.0]]])  # oldest first
    y, final_state = causal_conv1d(x, torch.tensor([[100.0, 10.0, 1.0]]), initial_state=state)
    assert y.flatten().tolist() == [791.0, 912.0, 123.0]
    assert final_state.tolist() == [[[2.0, 3.0]]]


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_conv1d_matches_torch_on_one_document(activation, W):
    x, weight, bias, state = _inputs(W=W)
    padded = torch.cat([state[0], x.T], 1)[None]
    expected = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[1])[0].T
    if activation == "silu":
        expected = torch.nn.functional.silu(expected)
    out = causal_conv1d(x, weight, bias, activation=activation, initial_state=state)
    assert_within("y", out.y, expected, FLOAT64)
    assert torch.equal(out.final_state, padded[:, :, padded.shape[2] - (W - 1) :])


def test_causal_conv1d_keeps_packed_documents_apart():
    # Empty, one token, shorter than the filter, longer, and two rows of nobody.
    bounds = [0, 0, 1, 3, 9]
    x, weight, bias, state = _inputs(T=11, N=4)
    packed = causal_conv1d(x, weight, bias, cu_seqlens=bounds, initial_state=state)
    for n in range(4):
        rows = slice(bounds[n], bounds[n + 1])
        alone = causal_conv1d(x[rows], weight, bias, initial_state=state[n : n + 1])
        assert torch.equal(packed.y[rows], alone.y)
        assert torch.equal(packed.final_state[n], alone.final_state[0])
    assert torch.equal(packed.final_state[0], state[0])
    assert packed.y.shape == x.shape
    assert not packed.y[9:].any()


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 7, 11])
def test_causal_conv1d_continues_from_the_final_state_bitwise(cut):
    x, weight, bias, state = _inputs()
    whole = causal_conv1d(x, weight, bias, activation="silu", initial_state=state)
    first = causal_conv1d(x[:cut], weight, bias, activation="silu", initial_state=state)
    second = causal_conv1d(
        x[cut:], weight, bias, activation="silu", initial_state=first.final_state
    )
    assert torch.equal(torch.cat([first.y, second.y]), whole.y)
    assert torch.equal(second.final_state, whole.final_state)


def test_causal_conv1d_gradients_match_torch_on_packed_documents():
    bounds = [0, 2, 2, 9]
    leaves = [x.requires_grad_() for x in _inputs(T=10, N=3)]
    x, weight, bias, state = leaves
    out = causal_conv1d(x, weight, bias, cu_seqlens=bounds, activation="silu", initial_state=state)
    dy, d_state = torch.linspace(-1, 2, out.y.numel()).double().view_as(out.y), state.detach() + 1
    actual = torch.autograd.grad((out.y, out.final_state), leaves, (dy, d_state))

    loss = 0.0
    for n in range(3):
        rows = slice(bounds[n], bounds[n + 1])
        padded = torch.cat([state[n], x[rows].T], 1)
        loss = loss + (padded[:, padded.shape[1] - 3 :] * d_state[n]).sum()
        if padded.shape[1] > 3:
            y = torch.nn.functional.conv1d(padded[None], weight[:, None], bias, groups=3)[0].T
            loss = loss + (torch.nn.functional.silu(y) * dy[rows]).sum()
    expected = torch.autograd.grad(loss, leaves)
    names = ("dx", "dweight", "dbias", "d_state")
    for name, grad, ref in zip(names, actual, expected, strict=True):
        assert_within(name, grad, ref, FLOAT64)
