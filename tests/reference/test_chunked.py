"""The stages, each against the recurrence, autograd or its definition, and their composition."""

import pytest
import torch

from longdelta.reference import (
    AffineMap,
    Gradients,
    apply,
    chunked,
    chunked_backward,
    chunked_forward,
    recurrence,
    recurrence_gradients,
    transpose,
)
from longdelta.testing.budgets import FLOAT64, assert_within

# Empty, one token, around the end of a chunk, two chunks with a tail of two, four with a tail.
LENGTHS = [0, 1, 63, 64, 65, 130, 200]
GATES = ["mild", "model", "reset", 0.0, -6.0, -20.0, -120.0]
SCALE = 0.37


class Head:
    """One document of one head as lists of chunks, the last of them ragged."""

    def __init__(self, batch, requires_grad=False):
        self.tokens = [x[:, 0].clone() for x in batch.inputs]
        self.S_in = batch.initial_state[0, 0].clone()
        self.dS_out = batch.d_final_state[0, 0]
        if requires_grad:
            self.leaves = [x.requires_grad_() for x in (*self.tokens, self.S_in)]
        self.q, self.k, self.v, self.g, self.beta = (x.split(64) for x in self.tokens)
        self.do = batch.do[:, 0].split(64)
        self.G, self.Z, self.bound = chunked.prepare(self.k, self.g, self.beta)

    def scan(self):
        return chunked.scan(
            self.q, self.k, self.v, self.G, self.Z, self.beta, self.S_in, scale=SCALE
        )

    def summarize(self, S_in):
        return chunked.summarize(self.k, self.v, self.G, self.Z, self.beta, S_in)

    def adjoint(self, stage, dS_out):
        return stage(self.q, self.k, self.G, self.Z, self.beta, self.do, dS_out, scale=SCALE)

    def recurrence(self, tokens=slice(None), S_in=None):
        q, k, v, g, beta = (x[tokens, None] for x in self.tokens)
        state = (self.S_in if S_in is None else S_in)[None, None]
        return recurrence(q, k, v, g, beta, scale=SCALE, initial_state=state)


@pytest.fixture(params=["mild", "model", "reset", -6.0])
def head(request, make_batch):
    return Head(make_batch([150], request.param, "to_two", heads=(1, 1)))


def test_prepare_inverts_the_triangle_without_the_gate(head):
    for k, beta, Z in zip(head.k, head.beta, head.Z, strict=True):
        eye = torch.eye(len(k), dtype=torch.float64)
        N = (k @ k.T).tril(-1)
        inverse = eye + beta[:, None] * Z
        assert_within("T0", (eye + beta[:, None] * N) @ inverse, eye, FLOAT64)
        assert torch.equal(Z, Z.tril(-1))
        assert Z.abs().max() <= 1.0  # unit keys and beta <= 2


def test_prepare_floors_the_gate_before_the_sum():
    g = torch.tensor([-1.0, -torch.inf, -2.0, -88.0], dtype=torch.float64)
    G, Z, _ = chunked.prepare([torch.zeros(4, 2).double()], [g], [torch.ones(4).double()])
    assert G[0].tolist() == [-1.0, -88.0, -90.0, -177.0]
    assert not Z[0].any()


def test_scan_matches_the_recurrence_and_tapes_the_state_of_every_chunk(head):
    out, expected = head.scan(), head.recurrence()
    assert_within("o", torch.cat(out.o), expected.o[:, 0], FLOAT64)
    assert_within("S_out", out.S_out, expected.final_state[0, 0], FLOAT64)
    for c, S in enumerate(out.tape.S):
        prefix = head.recurrence(slice(0, 64 * c))
        assert_within(f"S of chunk {c}", S, prefix.final_state[0, 0], FLOAT64)


def test_scan_tapes_the_correction_of_every_token(head):
    Uh = torch.cat(head.scan().tape.Uh)
    _q, k, v, g, _beta = head.tokens
    S, expected = head.S_in, []
    for t in range(len(k)):
        P = g[t].exp() * S
        expected.append(v[t] - k[t] @ P)
        S = head.recurrence(slice(t, t + 1), S).final_state[0, 0]
    assert_within("Uh", Uh, torch.stack(expected), FLOAT64)


def test_summarize_carries_any_state_as_scan_does(head):
    step = head.summarize(torch.zeros_like(head.S_in))
    assert_within("S_out", apply(step, head.S_in), head.scan().S_out, FLOAT64)


def test_summarize_gives_the_state_itself_where_the_walk_starts_from_it(head):
    walked = head.summarize(head.S_in)
    assert_within("S_ext", walked.B, head.scan().S_out, FLOAT64)
    assert torch.equal(walked.M, head.summarize(torch.zeros_like(head.S_in)).M)


def test_summarize_gives_the_jacobian_of_the_recurrence(make_batch):
    head = Head(make_batch([70], "mild", "to_two", heads=(1, 1), dims=(4, 4)))
    step = 2**20  # The rule is affine in the state: a long step leaves the difference its digits.
    columns = [
        head.recurrence(S_in=head.S_in + step * row).final_state[0, 0]
        - head.recurrence(S_in=head.S_in).final_state[0, 0]
        for row in torch.eye(4, dtype=torch.float64)[:, :, None].expand(4, 4, 4)
    ]
    jacobian = torch.stack([x[:, 0] / step for x in columns], 1)
    assert_within("M", head.summarize(head.S_in).M, jacobian, FLOAT64)


@pytest.mark.parametrize("length", [1, 2])  # of a key: at 2 a token may stretch a state
def test_prepare_bounds_the_norm_of_the_transition_of_every_chunk(head, length):
    k = [length * x for x in head.k]
    G, Z, bound = chunked.prepare(k, head.g, head.beta)
    assert len(bound) == len(k)
    zero = torch.zeros_like(head.S_in)
    for x in zip(k, head.v, G, Z, head.beta, bound, strict=True):
        step = chunked.summarize(*([y] for y in x[:5]), zero)
        assert torch.linalg.matrix_norm(step.M, 2).log() <= x[5] + 1e-9


def test_prepare_bounds_a_token_exactly():
    k = torch.tensor([[3.0, 4.0]]).double()
    bounds = [
        chunked.prepare([k], [torch.tensor([g]).double()], [torch.tensor([b]).double()]).bound
        for g, b in ((-1.0, 0.5), (-1.0, 0.04), (-torch.inf, 0.0))
    ]
    expected = torch.tensor([torch.log(torch.tensor(11.5)) - 1, -1, -87]).double()
    assert_within("bound", torch.stack([b[0] for b in bounds]), expected, 1e-7)


def test_fold_sends_the_state_from_left_to_right():
    double_and_one = AffineMap(torch.tensor([[2.0]]), torch.tensor([[1.0]]))
    triple = AffineMap(torch.tensor([[3.0]]), torch.tensor([[0.0]]))
    states = chunked.fold(torch.tensor([[5.0]]), [double_and_one, triple])
    assert [S.item() for S in states] == [5.0, 11.0, 33.0]
    assert [S.item() for S in chunked.fold(torch.tensor([[5.0]]), [])] == [5.0]


@pytest.mark.parametrize("gates", ["mild", "model", "reset", -6.0])
def test_adjoint_scan_matches_autograd_of_the_recurrence(make_batch, gates):
    head = Head(make_batch([150], gates, "to_two", heads=(1, 1)))
    dS_in, tape = head.adjoint(chunked.adjoint_scan, head.dS_out)
    assert torch.equal(tape.dS[-1], head.dS_out)
    for c, S in enumerate(head.scan().tape.S):
        # The cotangent of the state between two chunks: what all later tokens send to it.
        S.requires_grad_()
        rest = head.recurrence(slice(64 * c, None), S)
        cotangents = torch.cat(head.do)[64 * c :, None], head.dS_out[None, None]
        (expected,) = torch.autograd.grad(tuple(rest), S, cotangents)
        actual = dS_in if c == 0 else tape.dS[c - 1]
        assert_within(f"dS before chunk {c}", actual, expected, FLOAT64)


@pytest.mark.parametrize("gates", ["mild", "model", "reset", -6.0])
def test_adjoint_scan_tapes_the_cotangent_of_the_values_over_beta(make_batch, gates):
    head = Head(make_batch([150], gates, "to_two", heads=(1, 1)), requires_grad=True)
    cotangents = torch.cat(head.do)[:, None], head.dS_out[None, None]
    (dv,) = torch.autograd.grad(tuple(head.recurrence()), head.tokens[2], cotangents)
    dR = torch.cat(head.adjoint(chunked.adjoint_scan, head.dS_out).tape.dR)
    assert_within("dv", head.tokens[4][:, None] * dR, dv, FLOAT64)


def test_adjoint_summarize_and_the_transposed_map_carry_any_cotangent(head):
    zero = torch.zeros_like(head.dS_out)
    step = transpose(head.summarize(zero), head.adjoint(chunked.adjoint_summarize, zero))
    expected = head.adjoint(chunked.adjoint_scan, head.dS_out).dS_in
    assert_within("dS_in", apply(step, head.dS_out), expected, FLOAT64)


def test_adjoint_summarize_gives_the_cotangent_itself_where_the_walk_starts_from_it(head):
    walked = head.adjoint(chunked.adjoint_summarize, head.dS_out)
    expected = head.adjoint(chunked.adjoint_scan, head.dS_out).dS_in
    assert_within("dS_ext", walked, expected, FLOAT64)


@pytest.mark.parametrize("gates", ["mild", "model", "reset", -6.0])
def test_gradients_match_autograd_of_scan_and_prepare(make_batch, gates):
    head = Head(make_batch([150], gates, "to_two", heads=(1, 1)), requires_grad=True)
    out = head.scan()
    expected = torch.autograd.grad(
        (torch.cat(out.o), out.S_out), head.leaves, (torch.cat(head.do), head.dS_out)
    )
    with torch.no_grad():
        adjoint = head.adjoint(chunked.adjoint_scan, head.dS_out)
        actual = chunked.gradients(
            *(head.q, head.k, head.g, head.beta, head.do, out.tape, adjoint.tape), scale=SCALE
        )
    for name, chunks, ref in zip(actual._fields, actual, expected[:5], strict=True):
        assert_within(name, torch.cat(chunks), ref, FLOAT64)
    assert_within("dS_in", adjoint.dS_in, expected[5], FLOAT64)


def test_gradients_are_zero_for_a_gate_at_or_below_the_floor(make_batch):
    batch = make_batch([80], heads=(1, 1))
    batch.g[[10, 40, 70]] = torch.tensor([[-87.0], [-1e30], [-torch.inf]], dtype=torch.float64)
    dg = chunked_backward(*batch.inputs, **batch.backward).dg
    assert (dg == 0).nonzero()[:, 0].tolist() == [10, 40, 70]


@pytest.mark.parametrize("betas", ["sigmoid", "zero", "to_two"])
@pytest.mark.parametrize("gates", GATES)
def test_chunked_form_matches_the_recurrence_however_it_is_split(make_batch, gates, betas):
    batch = make_batch(LENGTHS, gates, betas, tail=3)
    mild = make_batch(LENGTHS, "mild", betas, tail=3)

    def vanishes(name):
        # Towards zero by strong decay: what counts is the size of the error beside a mild run.
        if gates == -120.0 and betas == "zero":
            return True  # nothing written, nothing kept: all that is left is below e^-87
        return gates in (-6.0, -20.0, -120.0) and name in ("dg", "d_initial_state")

    def check(chunked_form, definition, arguments):
        expected = definition(*batch.inputs, **getattr(batch, arguments))
        of_mild = definition(*mild.inputs, **getattr(mild, arguments))
        for split in (None, 1, 2, 3):
            actual = chunked_form(*batch.inputs, **getattr(batch, arguments), segment_chunks=split)
            for name, out, ref, size in zip(actual._fields, actual, expected, of_mild, strict=True):
                label = f"{name} in segments of {split}"
                assert_within(label, out, ref, FLOAT64, size if vanishes(name) else None)

    check(chunked_forward, recurrence, "forward")
    check(chunked_backward, recurrence_gradients, "backward")


def test_chunked_form_matches_the_recurrence_over_seven_segments(make_batch):
    batch = make_batch([400], "mild", "to_two", heads=(1, 2))
    forward = chunked_forward(*batch.inputs, **batch.forward, segment_chunks=1)
    expected = recurrence(*batch.inputs, **batch.forward)
    assert_within("o", forward.o, expected.o, FLOAT64)
    assert_within("final_state", forward.final_state, expected.final_state, FLOAT64)
    backward = chunked_backward(*batch.inputs, **batch.backward, segment_chunks=1)
    expected = recurrence_gradients(*batch.inputs, **batch.backward)
    for name, out, ref in zip(Gradients._fields, backward, expected, strict=True):
        assert_within(name, out, ref, FLOAT64)


def test_chunked_form_gives_exact_zeros_where_beta_is_zero(make_batch):
    batch = make_batch([100], betas="zero")
    zeros = torch.zeros_like(batch.initial_state)
    out = chunked_forward(*batch.inputs, **{**batch.forward, "initial_state": zeros})
    grads = chunked_backward(*batch.inputs, **batch.backward)
    assert not out.o.any()
    assert not out.final_state.any()
    assert not grads.dv.any()
    assert grads.dbeta.all()


def test_chunked_form_leaves_its_inputs_untouched(make_batch):
    batch = make_batch([70, 10])
    copies = [x.clone() for x in batch[:8]]
    chunked_forward(*batch.inputs, **batch.forward, segment_chunks=1)
    chunked_backward(*batch.inputs, **batch.backward, segment_chunks=1)
    assert all(torch.equal(x, copy) for x, copy in zip(batch[:8], copies, strict=True))
