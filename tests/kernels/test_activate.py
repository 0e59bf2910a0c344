from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longdelta.kernels.stages import Activation, Tables
from longdelta.ops.saved import compute_dtype
from longdelta.plan.chunks import walk
from longdelta.plan.tensors import ACTIVATED
from longdelta.reference import activate
from longdelta.testing.budgets import EAGER, assert_within

T, H, HV, K = 67, 3, 6, 128
ALL = Activation(qk_l2norm=True, gate=True, beta_sigmoid=True)


class Raw(NamedTuple):
    q: Tensor
    k: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def rows(self, start: int, stop: int) -> "Raw":
        return Raw(*(x[start:stop] for x in self[:4]), *self[4:])


@pytest.fixture
def raw(machine, dtype) -> Raw:
    """Lengths far from one; gates from a few tokens to a few thousand."""
    scales = 30 * torch.rand(T, H, 1)
    x = [(scales * torch.randn(T, H, K)).to(dtype) for _ in "qk"]
    x += [torch.randn(T, HV).to(compute_dtype(dtype)) for _ in "ab"]
    x += [torch.linspace(-4, 2.77, HV), torch.linspace(-7, 1, HV)]
    return Raw(*(y.to(machine.device) for y in x))


@pytest.fixture
def run(backend, machine, dtype):
    """The stage on raw inputs; outputs are full of NaN before."""

    def stage(x: Raw, activation: Activation = ALL, names=ACTIVATED, **changes) -> list[Tensor]:
        wide = compute_dtype(dtype)
        unit = dtype if machine.backend == "gluon" else wide
        sizes = (x.q.shape, x.k.shape, x.a.shape, x.b.shape)
        places = {
            name: torch.full(size, float("nan"), dtype=kind, device=machine.device)
            for name, size, kind in zip(ACTIVATED, sizes, (unit, unit, wide, wide), strict=True)
            if name in names
        }
        given = x._asdict() | changes
        made = {name: places.get(name) for name in ACTIVATED}
        plan = walk((0, len(x.q)), HV)
        backend.activate(*given.values(), activation, Tables(plan, x.q.device), **made)
        return list(places.values())

    return stage


def check(found: list[Tensor], raw: Raw, **options) -> None:
    wanted = activate(*(x.cpu() for x in raw), **options)
    for name, x, ref in zip(ACTIVATED, found, wanted, strict=True):
        assert_within(name, x, ref, EAGER[x.dtype])


@pytest.mark.parametrize("neg_eigval", [False, True])
def test_activate_matches_the_reference_and_writes_every_element(run, raw, neg_eigval):
    found = run(raw, Activation(True, True, True, neg_eigval))
    check(found, raw, neg_eigval=neg_eigval)


def test_activate_takes_views_with_the_bits_of_whole_tensors(run, raw, view):
    views = Raw(*map(view, raw[:4]), *raw[4:])
    assert not any(x.is_contiguous() for x in views[:4])
    for x, y in zip(run(views), run(raw), strict=True):
        assert torch.equal(x, y)


def test_activate_gives_rounded_gates_the_bits_of_the_same_numbers_in_float32(run, raw):
    rounded = raw._replace(a=raw.a.bfloat16(), b=raw.b.bfloat16())
    widened = raw._replace(a=rounded.a.float(), b=rounded.b.float())
    for x, y in zip(run(rounded), run(widened), strict=True):
        assert torch.equal(x, y)


def test_activate_gives_a_row_the_same_bits_wherever_it_stands(run, raw):
    whole = run(raw)
    for x, y in zip(run(raw.rows(5, 42)), whole, strict=True):
        assert torch.equal(x, y[5:42])


def test_activate_takes_gates_without_a_bias(run, raw):
    found = run(raw, dt_bias=None)
    check(found, raw._replace(dt_bias=torch.zeros(HV)))


def test_activate_widens_what_is_neither_raw_nor_float32(run, raw):
    g, beta = run(raw, Activation(), ("g", "beta"), a=raw.a.half(), b=raw.b.half().T.contiguous().T)
    assert torch.equal(g, raw.a.half().to(g.dtype))
    assert torch.equal(beta, raw.b.half().to(beta.dtype))


@pytest.mark.parametrize("name", ACTIVATED)
def test_activate_makes_what_is_asked_for_alone_with_the_same_bits(run, raw, name):
    names = ("q_unit", "k_unit") if name.endswith("unit") else (name,)
    whole = dict(zip(ACTIVATED, run(raw), strict=True))
    for x, one in zip(run(raw, names=names), names, strict=True):
        assert torch.equal(x, whole[one])


def test_activate_keeps_rows_of_zeros_at_zero(run, raw):
    raw.q[3], raw.k[5] = 0, 0
    q, k, _, _ = found = run(raw)
    assert not q[3].any()
    assert not k[5].any()
    check(found, raw)


def test_activate_saturates_without_overflow(run, raw):
    raw.a[::2], raw.a[1::2], raw.b[::2], raw.b[1::2] = 100.0, -100.0, 100.0, -100.0
    raw.A_log[0] = float("-inf")  # a head that never decays
    found = run(raw)
    check(found, raw)
    _, _, g, beta = found
    assert not g[:, 0].any()
    assert g[1::2].abs().max() < 1e-36
    assert (beta[::2] == 1).all()
    assert beta[1::2].abs().max() < 1e-36


def test_activate_keeps_the_digits_of_gates_that_hardly_decay(run, raw):
    raw.a.copy_(torch.linspace(-60, 60, T)[:, None])
    g = run(raw)[2].double().cpu()
    ref = activate(*(x.cpu() for x in raw)).g
    assert ((g - ref) / ref).abs().max() < EAGER[torch.float32]
