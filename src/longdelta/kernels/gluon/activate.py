"""activate: raw inputs as the rule takes them, in one launch.

    q^ = q / sqrt(<q, q> + 1e-6)    g = -e^A_log softplus(a + dt_bias)    beta = top / (1 + e^-b)
k^ like q^. Views are read where they lie; q^ and k^ leave in bf16, g and beta in fp32. fp32 inside,
one rounding at the end. A row's sum is made of 8 elements in each of 16 threads, then across them:
always alike, so its bits depend on the row alone.

Programs: tiles of TILE_ROWS rows of q, then k, then _GATES gates. A thread has four 16-byte loads
under way, and ten programs fit an SM; nothing passes through shared memory. Bound by memory: 1 KiB
for a token and q/k head, so 0.13 ms for 32,768 tokens of 16 heads; for a gate and a beta 12 to 16
bytes. Row factors inside the other stages in place of this pass: decision 0011.

softplus(x) = max(x, 0) + log1p(e) with e = exp(-|x|), and log1p(e) = 2 artanh(e / (2 + e)), whose
series up to the 13th power is right to 2e-8 for all e in [0, 1]; log(1 + e) would lose the digits
of gates that hardly decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longdelta.kernels.gluon.dialect import follow
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import to_bf16
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import NORM_EPS, Activation, Tables
from longdelta.runtime.launch import Program, resolved

TILE_ROWS, _GATES = 32, 1024
_EPS = gl.constexpr(NORM_EPS)


@gluon.jit
def _normalise(x, x_t, x_h, x_d, out, block, rows, H, ROWS: gl.constexpr):
    """A tile of rows (token, head) of 128 elements, each of them to length 1."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :].to(gl.int64)
    row = (r // H).to(gl.int64) * x_t + (r % H).to(gl.int64) * x_h
    there = (r < rows)[:, None]
    y = gl.load(x + row[:, None] + d * x_d, mask=there, other=0.0).to(gl.float32)
    y = y * gl.rsqrt(gl.sum(y * y, 1) + _EPS)[:, None]
    gl.store(out + r.to(gl.int64)[:, None] * 128 + d, to_bf16(y), mask=there)


@gluon.jit
def softplus(x):
    e = gl.exp(-gl.abs(x))
    s = e / (2.0 + e)
    z = s * s
    series = z * (1 / 13) + 1 / 11
    for n in gl.static_range(1, 6):
        series = series * z + 1 / (11 - 2 * n)
    return gl.maximum(x, 0.0) + 2.0 * s * series


@gluon.jit
def _gate(
    a, a_t, a_h, A_log, dt_bias, g, t, h, i, there, ACTIVATE: gl.constexpr, BIAS: gl.constexpr
):
    x = gl.load(a + t * a_t + h * a_h, mask=there, other=0.0).to(gl.float32)
    if ACTIVATE:
        if BIAS:
            x += gl.load(dt_bias + h).to(gl.float32)
        x = -gl.exp(gl.load(A_log + h).to(gl.float32)) * softplus(x)
    gl.store(g + i, x, mask=there)


@gluon.jit
def _beta(b, b_t, b_h, top, beta, t, h, i, there, ACTIVATE: gl.constexpr):
    x = gl.load(b + t * b_t + h * b_h, mask=there, other=0.0).to(gl.float32)
    if ACTIVATE:
        x = gl.div_rn(top, 1.0 + gl.exp(-x))
    gl.store(beta + i, x, mask=there)


@gluon.jit(do_not_specialize=["tokens", "H", "HV", "a_t", "b_t"])
def activate_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    q_unit,
    k_unit,
    g,
    beta,
    tokens,
    H,
    HV,
    top,
    q_t,
    q_h,
    q_d,
    k_t,
    k_h,
    k_d,
    a_t,
    a_h,
    b_t,
    b_h,
    NORM: gl.constexpr,
    G: gl.constexpr,
    GATE: gl.constexpr,
    BIAS: gl.constexpr,
    BETA: gl.constexpr,
    SIGMOID: gl.constexpr,
    ROWS: gl.constexpr,
    GATES: gl.constexpr,
):
    follow()
    block = gl.program_id(0)
    rows = tokens * H
    blocks = gl.cdiv(rows, ROWS)
    if NORM:
        if block < blocks:
            _normalise(q, q_t, q_h, q_d, q_unit, block, rows, H, ROWS)
        elif block < 2 * blocks:
            _normalise(k, k_t, k_h, k_d, k_unit, block - blocks, rows, H, ROWS)
        block -= 2 * blocks
    if G or BETA:
        if block >= 0:
            L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
            i = block * GATES + gl.arange(0, GATES, layout=L)
            there = i < tokens * HV
            t = (i // HV).to(gl.int64)
            h = i % HV
            if G:
                _gate(a, a_t, a_h, A_log, dt_bias, g, t, h, i, there, GATE, BIAS)
            if BETA:
                _beta(b, b_t, b_h, top, beta, t, h, i, there, SIGMOID)


def _program(
    tables: DeviceTables,
    H: int,
    HV: int,
    strides: tuple[int, ...],
    made: tuple[bool, bool, bool],
    BIAS: bool,
    raw: Activation,
) -> Program:
    tokens = tables.walk.rows
    NORM, G, BETA = made
    tiles = NORM * 2 * cdiv(tokens * H, TILE_ROWS) + (G or BETA) * cdiv(tokens * HV, _GATES)
    return Program(
        activate_kernel,
        tiles,
        tables.device,
        tokens,
        H,
        HV,
        raw.top,
        *strides,
        NORM=NORM,
        G=G,
        GATE=raw.gate,
        BIAS=BIAS,
        BETA=BETA,
        SIGMOID=raw.beta_sigmoid,
        ROWS=TILE_ROWS,
        GATES=_GATES,
    )


def activate(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: Activation,
    tables: Tables,
    *,
    q_unit: Tensor | None,
    k_unit: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
) -> None:
    strides = (*q.stride(), *k.stride(), *a.stride(), *b.stride())
    made = (q_unit is not None, g is not None, beta is not None)
    bias = dt_bias is not None
    scalars = (q.shape[1], a.shape[1], strides, made, bias, activation)
    rates = a if A_log is None else A_log.contiguous()
    resolved(tables_of(tables), _program, *scalars)(
        q,
        k,
        a,
        b,
        rates,
        rates if dt_bias is None else dt_bias.contiguous(),
        q if q_unit is None else q_unit,
        k if k_unit is None else k_unit,
        a if g is None else g,
        b if beta is None else beta,
    )


def usual_inputs(name: str) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Variants of activate or adjoint_activate for the usual calls: name, constants, types.

    Gates and betas come raw in bf16, or ready in fp32, or, with a beta to cast, in fp32 and bf16.
    """
    for which, NORM, RAW, CAST in (
        ("", True, True, False),
        (", norm alone", True, False, False),
        (", norm, beta cast", True, False, True),
        (", gates alone", False, True, False),
    ):
        constants = dict.fromkeys(("G", "GATE", "BIAS", "SIGMOID"), RAW)
        constants |= {"NORM": NORM, "BETA": RAW or CAST, "ROWS": TILE_ROWS}
        constants |= dict.fromkeys(("q_d", "k_d", "a_h", "b_h"), 1)
        types = dict.fromkeys(("a", "da"), "*bf16" if RAW else "*fp32")
        types |= dict.fromkeys(("b", "db"), "*bf16" if RAW or CAST else "*fp32")
        types |= dict.fromkeys(("q_unit", "k_unit", "dq", "dk"), "*bf16")
        types |= dict.fromkeys(("dq_unit", "dk_unit"), "*fp32" if NORM else "*bf16")
        types |= dict.fromkeys(("A_log", "dt_bias", "dg", "dbeta", "sums"), "*fp32")
        types |= dict.fromkeys(("tokens", "used", "a_t", "b_t"), "i32") | {"top": "fp32"}
        yield name + which, constants, types | dict.fromkeys(("q_t", "q_h"), "i32:16")


VARIANTS = tuple(
    Variant(name, activate_kernel, 0, {**constants, "GATES": _GATES}, types=types)
    for name, constants, types in usual_inputs("activate")
)
