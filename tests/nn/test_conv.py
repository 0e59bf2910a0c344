"""causal_conv1d against the reference, forward and gradients."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longdelta import reference
from longdelta.errors import InvalidInput
from longdelta.nn import ConvOutput, ShortConvolution, causal_conv1d
from longdelta.testing import budgets

# Longer than W, then every kind of short one: under W - 1 tokens, W - 1 at most, and empty.
PACKINGS = {
    "three_documents": [37, 51, 40],
    "short_and_empty": [1, 1, 2, 0, 5],
    "all_empty": [0, 0],
    "none": [],
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Problem(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor
    initial_state: Tensor
    cu_seqlens: Tensor

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Copies of x, weight, bias and initial_state that ask for gradients."""
        return [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in self[:4]]


def make_problem(
    lengths: list[int], D: int = 6, W: int = 4, dtype: torch.dtype = torch.float64, rest: int = 0
) -> Problem:
    """Packed documents and `rest` rows after them."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    shapes = [(sum(lengths) + rest, D), (D, W), (D,), (len(lengths), D, W - 1)]
    tensors = [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]
    return Problem(*tensors, cu_seqlens)


def compare(problem: Problem, activation: str | None, use_y: bool = True) -> None:
    """y, final_state and the four gradients, for random cotangents."""
    leaves, exact = problem.leaves(), problem.leaves(torch.float64)
    out = causal_conv1d(
        leaves[0],
        leaves[1],
        leaves[2],
        activation=activation,
        cu_seqlens=problem.cu_seqlens,
        initial_state=leaves[3],
        output_final_state=True,
    )
    expected = reference.causal_conv1d(
        exact[0],
        exact[1],
        exact[2],
        activation=activation,
        cu_seqlens=problem.cu_seqlens.tolist(),
        initial_state=exact[3],
    )
    # Without a token the reference's y hangs on nothing: tie it to the leaves, by zero.
    expected = [t + 0 * sum(leaf.sum() for leaf in exact) for t in expected]
    assert out.y.dtype == out.final_state.dtype == problem.x.dtype
    cotangents = [torch.randn_like(t) for t in out]
    used = slice(0 if use_y else 1, None)
    gradients = torch.autograd.grad(
        out[used], leaves, cotangents[used], allow_unused=True, materialize_grads=True
    )
    truths = torch.autograd.grad(
        expected[used],
        exact,
        [c.double() for c in cotangents[used]],
        allow_unused=True,
        materialize_grads=True,
    )
    names = ("y", "final_state", "dx", "dweight", "dbias", "d_initial_state")
    for name, got, truth in zip(names, (*out, *gradients), (*expected, *truths), strict=True):
        assert got.dtype == problem.x.dtype
        budgets.assert_within(name, got, truth, budgets.EAGER[got.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("packing", ["three_documents", "short_and_empty"])
def test_conv_matches_reference_in_every_dtype(
    packing: str, activation: str | None, dtype: torch.dtype
) -> None:
    compare(make_problem(PACKINGS[packing], dtype=dtype, rest=3), activation)


@pytest.mark.parametrize("W", [1, 2, 3, 9])  # no history; one token; longer than most documents
@pytest.mark.parametrize("packing", PACKINGS)
def test_conv_matches_reference_for_every_width_and_packing(packing: str, W: int) -> None:
    compare(make_problem(PACKINGS[packing], W=W, rest=2), "silu")


def test_conv_gradients_are_right_for_a_document_shorter_than_the_taps_with_only_its_state() -> (
    None
):
    compare(make_problem([1], D=128, W=4), "silu", use_y=False)


def test_conv_without_boundaries_takes_each_row_of_a_batch_as_a_document() -> None:
    B, T, D, W = 2, 5, 3, 4
    x, weight = torch.randn(B, T, D).double(), torch.randn(D, W).double()
    state = torch.randn(B, D, W - 1).double()
    y, final_state = causal_conv1d(x, weight, initial_state=state, output_final_state=True)
    for row in range(B):
        expected = reference.causal_conv1d(x[row], weight, initial_state=state[row : row + 1])
        budgets.assert_within("y", y[row], expected.y, budgets.FLOAT64)
        budgets.assert_within(
            "final_state", final_state[row], expected.final_state[0], budgets.FLOAT64
        )


def test_conv_of_a_batch_of_short_rows_has_the_gradients_of_its_final_state() -> None:
    x = torch.randn(2, 2, 128).double().requires_grad_()
    out = causal_conv1d(x, torch.randn(128, 4).double(), output_final_state=True)
    cotangent = torch.randn(2, 128, 3).double()
    (dx,) = torch.autograd.grad(out.final_state, x, cotangent)
    # The last two of three history places are the tokens themselves.
    assert torch.equal(dx, cotangent[:, :, 1:].mT)


@pytest.mark.parametrize("D", [16, 32, 37])  # vectors, and what is left over
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_conv_of_a_document_has_the_same_bits_alone_and_packed(dtype: torch.dtype, D: int) -> None:
    problem = make_problem(PACKINGS["three_documents"], D=D, dtype=dtype)
    packed = causal_conv1d(
        problem.x, problem.weight, activation="silu", cu_seqlens=problem.cu_seqlens
    )
    bounds = problem.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        alone = causal_conv1d(problem.x[begin:end], problem.weight, activation="silu")
        assert torch.equal(packed.y[begin:end], alone.y)


def test_conv_rows_after_the_last_boundary_give_zero_and_take_zero_even_if_not_a_number() -> None:
    problem = make_problem([5, 2], rest=3)
    problem.x[7:] = float("nan")
    x, weight, bias, _ = problem.leaves()
    y, _ = causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=problem.cu_seqlens)
    y.sum().backward()
    assert torch.equal(y[7:], torch.zeros(3, 6).double())
    assert torch.equal(x.grad[7:], torch.zeros(3, 6).double())
    expected = reference.causal_conv1d(
        problem.x[:7], weight, bias, activation="silu", cu_seqlens=[0, 5, 7]
    )
    (dweight,) = torch.autograd.grad(expected.y.sum(), weight)
    budgets.assert_within("dweight", weight.grad, dweight, budgets.FLOAT64)


def test_conv_continues_a_document_from_its_final_state_bitwise() -> None:
    x, weight = torch.randn(9, 4), torch.randn(4, 4)
    whole = causal_conv1d(x, weight, output_final_state=True)
    first = causal_conv1d(x[:2], weight, output_final_state=True)  # shorter than W - 1
    second = causal_conv1d(x[2:], weight, initial_state=first.final_state, output_final_state=True)
    assert torch.equal(torch.cat([first.y, second.y]), whole.y)
    assert torch.equal(second.final_state, whole.final_state)


def test_conv_of_an_empty_document_keeps_a_wider_state_bitwise() -> None:
    state = torch.randn(1, 4, 3)
    out = causal_conv1d(
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.randn(4, 4),
        cu_seqlens=torch.tensor([0, 0]),
        initial_state=state,
        output_final_state=True,
    )
    assert torch.equal(out.final_state, state)


def test_conv_reads_strided_views_and_either_integer_dtype() -> None:
    wide, weight = torch.randn(1, 20, 12), torch.randn(6, 4)
    expected = causal_conv1d(
        wide[..., 1::2].contiguous(), weight, cu_seqlens=torch.tensor([0, 3, 20])
    )
    offsets = torch.tensor([0, 3, 20], dtype=torch.int32)
    got = causal_conv1d(wide[..., 1::2], weight, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    assert torch.equal(got.y, expected.y)


def test_conv_takes_boundaries_on_the_cpu_alone() -> None:
    x, weight = torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    bounds = torch.tensor([0, 2, 6])
    given = causal_conv1d(x, weight, cu_seqlens=bounds).y
    assert torch.equal(causal_conv1d(x, weight, cu_seqlens_cpu=bounds).y, given)


def test_conv_computes_in_float64_where_an_argument_is_float64() -> None:
    x, weight = torch.randn(7, 3), torch.randn(3, 4).double()
    state = torch.randn(1, 3, 3).double()
    out = causal_conv1d(x, weight, initial_state=state, output_final_state=True)
    expected = reference.causal_conv1d(x, weight, initial_state=state)
    assert torch.equal(out.y, expected.y.float())
    assert torch.equal(out.final_state, expected.final_state)


def test_conv_passes_gradcheck() -> None:
    problem = make_problem([3, 0, 1], D=2, W=3, rest=1)

    def run(*leaves: Tensor) -> ConvOutput:
        return causal_conv1d(
            *leaves[:3],
            activation="silu",
            cu_seqlens=problem.cu_seqlens,
            initial_state=leaves[3],
            output_final_state=True,
        )

    assert torch.autograd.gradcheck(run, problem.leaves())


def test_conv_compiles_into_one_graph_with_the_same_gradients_for_any_packing() -> None:
    compiled = torch.compile(causal_conv1d, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 0, 4], [1, 1, 2, 7]):
        problem = make_problem(lengths, rest=2)
        results = []
        for conv in (causal_conv1d, compiled):
            leaves = problem.leaves()
            out = conv(*leaves[:3], cu_seqlens=problem.cu_seqlens, initial_state=leaves[3])
            results += [[out.y, *torch.autograd.grad(out.y.square().sum(), leaves)]]
        for name, got, expected in zip(["y", "dx", "dw", "db", "ds"], *results[::-1], strict=True):
            budgets.assert_within(name, got, expected, budgets.FLOAT64)


def test_short_convolution_is_the_conv_with_its_weight_and_silu() -> None:
    module, x = ShortConvolution(6, 4), torch.randn(1, 8, 6)
    offsets = torch.tensor([0, 3, 8])
    expected = causal_conv1d(x, module.weight, activation="silu", cu_seqlens=offsets)
    assert torch.equal(module(x, offsets).y, expected.y)
    assert 0 < module.weight.abs().max() <= 0.5  # uniform within size^-1/2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(6)}, r"x must be \[B, T, D\] or \[T, D\]"),
        ({"x": torch.zeros(5, 6, dtype=torch.int64)}, "x must be .* float dtype, got .*int64"),
        ({"weight": torch.zeros(6, 1, 4)}, r"weight must be \[D=6, W\].*squeeze"),
        ({"weight": torch.zeros(5, 4)}, r"weight must be \[D=6, W\].*\(5, 4\)"),
        ({"bias": torch.zeros(4)}, r"bias must be \[D=6\] or None, got \(4,\)"),
        ({"bias": torch.zeros(6, device="meta")}, "bias must be .* on cpu.*meta"),
        ({"activation": "relu"}, "activation must be .*'relu'"),
        ({"initial_state": torch.zeros(1, 6, 4)}, r"initial_state must be \[N=2, D=6, W-1=3\]"),
        ({"x": torch.zeros(2, 5, 6)}, "B == 1 with cu_seqlens, got B=2"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "cu_seqlens must be .*int32 or int64"),
        ({"cu_seqlens": torch.zeros(2, 3, dtype=torch.int64)}, r"cu_seqlens must be \[N \+ 1\]"),
        (
            {"cu_seqlens": torch.empty(0, dtype=torch.int64)},
            r"cu_seqlens must hold N \+ 1 offsets.*\(0,\)",
        ),
        ({"cu_seqlens": torch.tensor([0, 5], device="meta")}, "cu_seqlens must .* cpu.*meta"),
        ({"cu_seqlens": torch.tensor([1, 3, 5])}, "start at 0.* 1"),
        ({"cu_seqlens": torch.tensor([0, 4, 3])}, "must not decrease.* 4 .* 3"),
        ({"cu_seqlens": torch.tensor([0, 3, 6])}, "within the T = 5 rows.* 6"),
        ({"cu_seqlens_cpu": torch.tensor([0, 5])}, r"cu_seqlens_cpu must hold .*\(2,\)"),
    ],
)
def test_conv_names_the_argument_at_fault(change: dict[str, object], message: str) -> None:
    good = {
        "x": torch.zeros(5, 6),
        "weight": torch.zeros(6, 4),
        "cu_seqlens": torch.tensor([0, 2, 5]),
    }
    with pytest.raises(InvalidInput, match=message):
        causal_conv1d(**(good | change))
