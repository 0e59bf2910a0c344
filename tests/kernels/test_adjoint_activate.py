from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from longdelta.kernels.stages import Activation, Tables
from longdelta.ops.saved import compute_dtype
from longdelta.plan.chunks import walk
from longdelta.plan.tensors import Counts, shape
from longdelta.reference import activate
from longdelta.testing.budgets import EAGER, assert_within

T, H, HV, K = 67, 3, 6, 128
ALL = Activation(qk_l2norm=True, gate=True, beta_sigmoid=True)
NAMES = ("dq", "dk", "da", "db", "dA_log", "ddt_bias")
SUMS = NAMES[4:]


class Raw(NamedTuple):
    q: Tensor
    k: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    dq_unit: Tensor
    dk_unit: Tensor
    dg: Tensor
    dbeta: Tensor

    def each(self, change) -> "Raw":
        """With what has a row for each token changed."""
        return Raw(*map(change, self[:4]), *self[4:6], *map(change, self[6:]))


@pytest.fixture
def make(machine, dtype):
    """Lengths far from one; gates from a few tokens to a few thousand."""

    def of(T: int, H: int, HV: int) -> Raw:
        wide = compute_dtype(dtype)
        scales = 30 * torch.rand(T, H, 1)
        x = [(scales * torch.randn(T, H, K)).to(dtype) for _ in "qk"]
        x += [torch.randn(T, HV).to(wide) for _ in "ab"]
        x += [torch.linspace(-4, 2.77, HV).to(wide), torch.linspace(-7, 1, HV).to(wide)]
        x += [torch.randn(T, H, K).to(wide) for _ in "qk"]
        x += [torch.randn(T, HV).to(wide) for _ in "ab"]
        return Raw(*(y.to(machine.device) for y in x))

    return of


@pytest.fixture
def raw(make) -> Raw:
    return make(T, H, HV)


@pytest.fixture
def run(backend):
    """The stage on raw inputs, of which the first `used` rows belong to a document; outputs are
    full of NaN before."""

    def stage(
        x: Raw, activation: Activation = ALL, names=NAMES, used: int | None = None, **changes
    ) -> dict[str, Tensor]:
        x = x._replace(**changes)
        places = {
            name: torch.full(y.shape, float("nan"), dtype=y.dtype, device=y.device)
            for name, y in zip(NAMES, x, strict=False)
            if name in names and y is not None
        }
        made = ("dq", "dk", "da", "db")
        cotangents = [c if n in names else None for n, c in zip(made, x[6:], strict=True)]
        rows, HV, nan = *x.a.shape, float("nan")
        plan = walk((0, rows if used is None else used), x.a.shape[1], rows=rows)
        backend.adjoint_activate(
            *x[:6],
            activation,
            Tables(plan, x.q.device),
            *cotangents,
            **{name: places.get(name) for name in NAMES},
            gate_sums=x[6].new_full(shape("gate_sums", Counts.of(plan), HV, K, K, T=rows), nan),
        )
        return places

    return stage


def expected(x: Raw, **options) -> dict[str, Tensor]:
    x = Raw(*(y.cpu().double() for y in x))
    leaves = [y.requires_grad_() for y in x[:6]]
    found = torch.autograd.grad(list(activate(*leaves, **options)), leaves, x[6:])
    return dict(zip(NAMES, found, strict=True))


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, x in found.items():
        assert_within(name, x, wanted[name], EAGER[x.dtype])


@pytest.mark.parametrize("neg_eigval", [False, True])
def test_adjoint_activate_matches_autograd_and_writes_every_element(run, raw, neg_eigval):
    found = run(raw, Activation(True, True, True, neg_eigval))
    assert tuple(found) == NAMES
    check(found, expected(raw, neg_eigval=neg_eigval))


SIZES = {"one": (1, 1, 1), "whole_tiles": (64, 2, 8), "heads_of_three_tiles": (129, 1, 19)}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_adjoint_activate_takes_any_number_of_tokens_and_heads(run, make, size):
    raw = make(*size)
    check(run(raw), expected(raw))


def test_adjoint_activate_takes_views_with_the_bits_of_whole_tensors(run, raw, view):
    views = Raw(*map(view, raw[:4]), *raw[4:])
    assert not any(x.is_contiguous() for x in views[:4])
    whole = run(raw)
    for name, x in run(views).items():
        assert torch.equal(x, whole[name]), name


def test_adjoint_activate_takes_parameters_that_are_views(run, raw):
    apart = {name: getattr(raw, name).repeat_interleave(2)[::2] for name in ("A_log", "dt_bias")}
    whole = run(raw)
    for name, x in run(raw, **apart).items():
        assert torch.equal(x, whole[name]), name


def test_adjoint_activate_rounds_once_what_it_makes_of_rounded_gates(run, raw):
    rounded = {name: getattr(raw, name).bfloat16() for name in "ab"}
    found = run(raw, **rounded)
    wide = run(raw, **{name: x.to(raw.a.dtype) for name, x in rounded.items()})
    assert found["da"].dtype == found["db"].dtype == torch.bfloat16
    for name, x in found.items():
        assert torch.equal(x, wide[name].to(x.dtype)), name


def test_adjoint_activate_gives_a_row_the_same_bits_wherever_it_stands(run, raw):
    whole = run(raw)
    part = run(raw.each(lambda x: x[5:42].contiguous()))
    for name in NAMES[:4]:
        assert torch.equal(part[name], whole[name][5:42]), name


def test_adjoint_activate_takes_gates_without_a_bias(run, raw):
    found = run(raw, dt_bias=None)
    assert "ddt_bias" not in found
    check(found, expected(raw._replace(dt_bias=torch.zeros(HV))))


PARTS = {
    "norm": ("dq", "dk"),
    "gate": ("da", *SUMS),
    "beta": ("db",),
    "gates": ("da", "db", *SUMS),
}


@pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
def test_adjoint_activate_makes_what_is_asked_for_alone_with_the_same_bits(run, raw, names):
    whole = run(raw)
    found = run(raw, names=names)
    assert set(found) == set(names)
    for name, x in found.items():
        assert torch.equal(x, whole[name]), name


@pytest.mark.parametrize("used", [0, 64, 65])
def test_adjoint_activate_casts_what_is_not_raw(run, raw, used):
    found = run(
        raw, Activation(), ("da", "db"), used, a=raw.a.half(), b=raw.b.half().T.contiguous().T
    )
    for name, cotangent in (("da", raw.dg), ("db", raw.dbeta)):
        assert torch.equal(found[name][:used], cotangent[:used].half())
        assert not found[name][used:].any()


@pytest.mark.parametrize("used", [0, 1, 40, 64])
def test_adjoint_activate_leaves_rows_of_no_document_out_of_everything(run, raw, used):
    def spoilt(x: Tensor) -> Tensor:
        x = x.clone()
        x[used:] = float("nan")
        return x

    found = run(raw.each(spoilt), used=used)
    for name in NAMES[:4]:
        assert not found[name][used:].any(), name
        found[name] = found[name][:used]
    check(found, expected(raw.each(lambda x: x[:used])))


def test_adjoint_activate_gives_rows_of_zeros_the_slope_at_zero(run, raw):
    raw.q[3], raw.k[5] = 0, 0
    found = run(raw)
    assert_within("dq", found["dq"][3], 1e3 * raw.dq_unit[3], EAGER[found["dq"].dtype])
    assert_within("dk", found["dk"][5], 1e3 * raw.dk_unit[5], EAGER[found["dk"].dtype])
    check(found, expected(raw))


def test_adjoint_activate_gives_zero_along_the_row_itself(run, raw):
    unit = activate(*(x.cpu() for x in raw[:6])).q.to(raw.dq_unit)
    found = run(raw, dq_unit=unit)["dq"]
    lengths = raw.q.double().norm(dim=-1, keepdim=True)
    assert (found.double() * lengths).abs().max() < EAGER[torch.float32]


def test_adjoint_activate_saturates_without_overflow(run, raw):
    raw.a[::2], raw.a[1::2], raw.b[::2], raw.b[1::2] = 80.0, -80.0, 80.0, -80.0
    raw.A_log[0] = float("-inf")  # a head that never decays
    found, wanted = run(raw), expected(raw)
    assert found["db"].abs().max() < 1e-33
    assert found["da"][1::2].abs().max() < 1e-32
    for name in ("da", *SUMS):
        assert not found[name][..., 0].any(), name
        assert_within(name, found[name], wanted[name], EAGER[found[name].dtype])


def test_adjoint_activate_keeps_the_digits_of_gates_that_hardly_decay(run, raw):
    raw.a.copy_(torch.linspace(-60, 60, T)[:, None])
    da = run(raw)["da"].double().cpu()
    ref = expected(raw)["da"]
    assert ((da - ref) / ref).abs().max() < EAGER[torch.float32]


def test_adjoint_activate_sums_many_tokens_to_the_same_bits_every_time(run, make):
    tokens = 64 * 512 + 1000  # more tiles than the second launch of the Hopper kernels has at once
    few = make(1, 1, 3)
    rows = {name: getattr(few, name).expand(tokens, 1, K) for name in ("q", "k")}
    wide = {name: torch.randn(tokens, 3).to(few.a) for name in ("a", "b", "dg", "dbeta")}
    many = few._replace(**rows, **wide)
    found, again = (run(many, names=PARTS["gates"]) for _ in range(2))
    units = {name: torch.zeros(tokens, 1, K) for name in ("dq_unit", "dk_unit")}
    check(found, expected(many._replace(**units)))
    for name, x in found.items():
        assert torch.equal(x, again[name]), name
