"""GatedDeltaNet against the same layer written with the reference's functions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longdelta import reference
from longdelta.errors import InvalidInput
from longdelta.nn import GatedDeltaNet, LayerState
from longdelta.testing import budgets

HIDDEN = 24
# Two chunks with a tail, an empty document, one shorter than the convolution, one of a chunk.
LENGTHS = [70, 0, 2, 64]
# A bfloat16 layer rounds x W, conv, o, norm, z, silu, their product and y: eight times in a row.
ROUNDINGS = 8


def make_layer(dtype: torch.dtype = torch.float64, **changes: object) -> GatedDeltaNet:
    options = {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "head_v_dim": 6} | changes
    return GatedDeltaNet(HIDDEN, **options).to(dtype)


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def reference_layer(layer: GatedDeltaNet, x: Tensor, bounds: list[int]) -> Tensor:
    """y of x ``[T, hidden]`` by the formulas of the class."""
    T = x.shape[0]
    qkv = reference.causal_conv1d(
        x @ layer.qkv_proj.weight.T, layer.conv.weight, activation="silu", cu_seqlens=bounds
    ).y
    q, k, v = qkv.split([layer.H * layer.K, layer.H * layer.K, layer.HV * layer.V], dim=-1)
    a, b = (x @ layer.ab_proj.weight.T).chunk(2, dim=-1)
    o = reference.recurrence(
        reference.l2norm(q.reshape(T, layer.H, layer.K)),
        reference.l2norm(k.reshape(T, layer.H, layer.K)),
        v.reshape(T, layer.HV, layer.V),
        reference.gate(a, layer.A_log, layer.dt_bias),
        b.sigmoid() * (2 if layer.allow_neg_eigval else 1),
        scale=layer.K**-0.5,
        cu_seqlens=bounds,
    ).o
    rms = (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    z = (x @ layer.z_proj.weight.T).reshape(T, layer.HV, layer.V)
    return (o / rms * layer.norm.weight * F.silu(z)).reshape(T, -1) @ layer.o_proj.weight.T


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_layer_matches_reference_with_every_parameter_gradient(allow_neg_eigval: bool) -> None:
    layer = make_layer(allow_neg_eigval=allow_neg_eigval)
    torch.nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    x = torch.randn(1, sum(LENGTHS), HIDDEN, dtype=torch.float64, requires_grad=True)
    cu_seqlens = boundaries(LENGTHS)
    y = layer(x, cu_seqlens).y
    expected = reference_layer(layer, x[0], cu_seqlens.tolist())
    budgets.assert_within("y", y[0], expected, budgets.FLOAT64)
    leaves = {"x": x, **dict(layer.named_parameters())}
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(y[0], list(leaves.values()), cotangent)
    truths = torch.autograd.grad(expected, list(leaves.values()), cotangent)
    for name, got, truth in zip(leaves, gradients, truths, strict=True):
        budgets.assert_within(f"d{name}", got, truth, budgets.FLOAT64)


def test_layer_leaks_nothing_between_documents() -> None:
    # A slow decay: a state that leaked would still be seen at the end of the next document.
    layer, lengths = make_layer(), [37, 51, 40]
    layer.A_log.data.fill_(-3.0)
    x = torch.randn(1, sum(lengths), HIDDEN, dtype=torch.float64)
    packed = layer(x, boundaries(lengths)).y
    alone = [layer(document).y for document in x.split(lengths, dim=1)]
    budgets.assert_within("y", packed, torch.cat(alone, dim=1), budgets.FLOAT64)


def test_layer_takes_each_row_of_a_batch_as_a_document() -> None:
    layer, x = make_layer(), torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    packed = layer(x.reshape(1, 18, HIDDEN), boundaries([9, 9])).y
    budgets.assert_within("y", layer(x).y, packed.reshape(x.shape), budgets.FLOAT64)


@pytest.mark.parametrize("cut", [2, 64, 77])  # under W - 1 tokens, a whole chunk, inside a chunk
def test_layer_continues_from_its_final_state_with_gradients_through_it(cut: int) -> None:
    layer = make_layer()
    x = torch.randn(1, 80, HIDDEN, dtype=torch.float64, requires_grad=True)
    whole = layer(x, output_final_state=True)
    first = layer(x[:, :cut], output_final_state=True)
    second = layer(x[:, cut:], initial_state=first.final_state, output_final_state=True)
    budgets.assert_within("y", torch.cat([first.y, second.y], 1), whole.y, budgets.FLOAT64)
    for name, got, truth in zip(
        LayerState._fields, second.final_state, whole.final_state, strict=True
    ):
        budgets.assert_within(name, got, truth, budgets.FLOAT64)
    # The loss sees the second part alone: dx of the first part came through the state.
    cotangent = torch.randn_like(second.y)
    (dx,) = torch.autograd.grad(second.y, x, cotangent)
    (truth,) = torch.autograd.grad(whole.y[:, cut:], x, cotangent)
    budgets.assert_within("dx", dx, truth, budgets.FLOAT64)
    assert dx[:, :cut].norm() > 0


def test_layer_rows_after_the_last_boundary_give_and_take_zero() -> None:
    layer = make_layer()
    x = torch.randn(1, 12, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = layer(x, torch.tensor([0, 9])).y
    y.sum().backward()
    assert torch.equal(y[:, 9:], torch.zeros(1, 3, HIDDEN).double())
    assert torch.equal(x.grad[:, 9:], torch.zeros(1, 3, HIDDEN).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layer_gate_parameters_keep_every_bit_in_a_narrower_cast(dtype: torch.dtype) -> None:
    layer = make_layer(torch.float32)
    before = copy.deepcopy(layer)
    parent = torch.nn.Sequential(layer).to(dtype)
    narrow = dict(parent[0].named_parameters())
    for name in ("A_log", "dt_bias"):
        assert torch.equal(narrow.pop(name), before.get_parameter(name))
    assert {p.dtype for p in narrow.values()} == {dtype}
    parent.float()
    assert torch.equal(layer.A_log, before.A_log)
    assert {p.dtype for p in parent.parameters()} == {torch.float32}


def test_layer_gate_parameters_follow_a_wider_cast_and_another_device() -> None:
    assert make_layer(torch.float64).A_log.dtype == torch.float64
    moved = make_layer(torch.float32).to("meta", torch.bfloat16)
    assert (moved.A_log.device.type, moved.A_log.dtype) == ("meta", torch.float32)


def test_layer_in_bfloat16_is_near_its_float64_twin_and_has_float32_gate_gradients() -> None:
    layer = make_layer(torch.bfloat16)
    x = torch.randn(1, sum(LENGTHS), HIDDEN).bfloat16()
    y = layer(x, boundaries(LENGTHS)).y
    y.float().square().sum().backward()
    twin = copy.deepcopy(layer).double()
    expected = twin(x.double(), boundaries(LENGTHS)).y
    assert y.dtype == torch.bfloat16
    budgets.assert_within("y", y, expected, ROUNDINGS * budgets.EAGER[torch.bfloat16])
    assert layer.A_log.grad.dtype == layer.dt_bias.grad.dtype == torch.float32
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())


def test_layer_gate_starts_within_its_ranges_and_log_uniform() -> None:
    layer = GatedDeltaNet(8, 1, num_v_heads=4096, head_dim=1)
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    slack = budgets.EAGER[torch.float32]
    assert A.min() >= 0.01 * (1 - slack)
    assert A.max() <= 16 * (1 + slack)
    assert dt.min() >= 1e-3 * (1 - slack)
    assert dt.max() <= 0.1 * (1 + slack)
    assert 7.5 < A.mean() < 8.5  # uniform: 8.005
    assert -4.7 < dt.log().mean() < -4.5  # log-uniform: log 1e-2 = -4.605


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, got 0"),
        ({"num_v_heads": 3}, "num_v_heads must be a multiple of num_heads=2, got 3"),
        ({"head_dim": -1}, "head_dim must be an integer of at least 1, got -1"),
        ({"head_v_dim": 6.0}, "head_v_dim must be an integer of at least 1, got 6.0"),
        ({"num_heads": "2"}, "num_heads must be an integer of at least 1, got '2'"),
        ({"conv_size": 0}, "conv_size must be an integer of at least 1, got 0"),
    ],
)
def test_layer_refuses_sizes_that_do_not_fit(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_layer(**change)


@pytest.mark.parametrize("state", [torch.zeros(2, 4), (1, 2), (torch.zeros(1),), "S"], ids=repr)
def test_layer_names_the_initial_state_that_is_no_layer_state(state: object) -> None:
    with pytest.raises(InvalidInput, match="initial_state must be a LayerState of two tensors"):
        make_layer(torch.float32)(torch.zeros(1, 5, HIDDEN), initial_state=state)


def test_layer_names_the_argument_at_fault() -> None:
    layer = make_layer(torch.float32)
    with pytest.raises(InvalidInput, match=r"hidden=24\]; got \[5, 24\]; unsqueeze a single"):
        layer(torch.zeros(5, HIDDEN))
    with pytest.raises(InvalidInput, match=r"hidden=24\]; got \[1, 5, 12\]$"):
        layer(torch.zeros(1, 5, 12))
    with pytest.raises(InvalidInput, match=r"the layer's dtype .*float32; got .*float64"):
        layer(torch.zeros(1, 5, HIDDEN, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="initial_state must be"):
        layer(
            torch.zeros(1, 5, HIDDEN),
            initial_state=LayerState(torch.zeros(1, 3, 3), torch.zeros(1, 4, 8, 6)),
        )
    with pytest.raises(
        InvalidInput, match=r"cp_context must come from .*build_cp_context; got object"
    ):
        layer(torch.zeros(1, 5, HIDDEN), cp_context=object())
