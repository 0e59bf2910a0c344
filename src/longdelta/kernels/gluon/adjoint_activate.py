"""adjoint_activate: the way back through activate, in one launch; sums over tokens in a second.

    y = q / |q|    dq = (dy - <dy, y> y) / |q|    |q| = sqrt(<q, q> + 1e-6), dk likewise
    x = a + dt_bias    da = -dg e^A_log s(x)    db = dbeta top s(b) s(-b)    s(x) = 1 / (1 + e^-x)
    dA_log = -sum_t dg e^A_log softplus(x)    ddt_bias = sum_t da
What is not activated is cast. Raw inputs are read where they lie, in any strides; cotangents and
results are contiguous. fp32 inside, one rounding at the end, sums of what is not rounded. With
e = exp(-|x|), s(x) is 1 / (1 + e) or e / (1 + e) and s(b) s(-b) = e / (1 + e)^2: nothing overflows,
and saturated gates keep their digits. Rows of no document are not read; their results are 0.

Programs: tiles of TILE_ROWS rows of q, then k, as in activate; then tiles of _TOKENS tokens and 8
value heads: halves of a 32-byte sector of bf16 meet in the L2 cache. Bound by memory: 2 KiB for a
token and q/k head, so 0.25 ms for 32,768 tokens of 16 heads; for a gate and a beta 16 to 24 bytes.

Sums: a tile of gates leaves those over its tokens, of each of its heads, in fp32, in `sums` [2,
tiles, HV]; a program of the second launch adds the tiles' of 8 heads. Elements of a register tile
add every _PARTS-th, then they are added, across threads last: always alike, so that the bits depend
on the count of tokens alone.
"""

from __future__ import annotations

from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longdelta.kernels.gluon.activate import TILE_ROWS, softplus, usual_inputs
from longdelta.kernels.gluon.dialect import follow
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import to_bf16
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import NORM_EPS, Activation, Tables
from longdelta.plan import chunks as plan
from longdelta.runtime.launch import Program, resolved

_TOKENS, _PARTS = plan.CHUNK, 512
_EPS = gl.constexpr(NORM_EPS)
HEADS = gl.constexpr(8)
CELLS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
"""Layout of tokens and value heads."""


@gluon.jit
def _adjoint_norm(x, x_t, x_h, x_d, dy, dx, block, used, rows, H, ROWS: gl.constexpr):
    """A tile of rows (token, head) of 128 elements, of which `used` and no more are read."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :].to(gl.int64)
    row = (r // H).to(gl.int64) * x_t + (r % H).to(gl.int64) * x_h
    at = r.to(gl.int64)[:, None] * 128 + d
    known = (r < used)[:, None]
    y = gl.load(x + row[:, None] + d * x_d, mask=known, other=0.0).to(gl.float32)
    c = gl.load(dy + at, mask=known, other=0.0)
    inverse = gl.rsqrt(gl.sum(y * y, 1) + _EPS)[:, None]
    y = y * inverse
    c = inverse * (c - gl.sum(c * y, 1)[:, None] * y)
    gl.store(dx + at, to_bf16(c), mask=(r < rows)[:, None])


@gluon.jit
def _adjoint_gate(raw, rates, dg, da, part, cells, ACTIVATE: gl.constexpr, BIAS: gl.constexpr):
    """da, and the tile's part of the sums: of dA_log, and so much further on of ddt_bias."""
    a, place = raw
    at, known, there = cells
    c = gl.load(dg + at, mask=known, other=0.0)
    if ACTIVATE:
        A_log, dt_bias, h, held = rates
        part, further = part
        x = gl.load(a + place, mask=known, other=0.0).to(gl.float32)
        if BIAS:
            x += gl.load(dt_bias + h, mask=held, other=0.0).to(gl.float32)[None, :]
        x = gl.where(known, x, 0.0)
        rate = -gl.exp(gl.load(A_log + h, mask=held, other=0.0).to(gl.float32))[None, :]
        c = gl.where(known, c * rate, 0.0)
        gl.store(part + h, gl.sum(c * softplus(x), 0), mask=held)
        e = gl.exp(-gl.abs(x))
        c = c * (gl.where(x < 0.0, e, 1.0) / (1.0 + e))
        if BIAS:
            gl.store(part + further + h, gl.sum(c, 0), mask=held)
    gl.store(da + at, c.to(da.dtype.element_ty), mask=there)


@gluon.jit
def _adjoint_beta(raw, top, dbeta, db, cells, ACTIVATE: gl.constexpr):
    b, place = raw
    at, known, there = cells
    c = gl.load(dbeta + at, mask=known, other=0.0)
    if ACTIVATE:
        e = gl.exp(-gl.abs(gl.load(b + place, mask=known, other=0.0).to(gl.float32)))
        c = c * top * (e / ((1.0 + e) * (1.0 + e)))
    gl.store(db + at, c.to(db.dtype.element_ty), mask=there)


@gluon.jit(do_not_specialize=["tokens", "used", "H", "HV", "a_t", "b_t"])
def adjoint_activate_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    dq_unit,
    dk_unit,
    dg,
    dbeta,
    dq,
    dk,
    da,
    db,
    sums,
    tokens,
    used,
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
    TOKENS: gl.constexpr,
):
    follow()
    block = gl.program_id(0)
    rows = tokens * H
    blocks = gl.cdiv(rows, ROWS)
    if NORM:
        if block < blocks:
            _adjoint_norm(q, q_t, q_h, q_d, dq_unit, dq, block, used * H, rows, H, ROWS)
        elif block < 2 * blocks:
            _adjoint_norm(k, k_t, k_h, k_d, dk_unit, dk, block - blocks, used * H, rows, H, ROWS)
        block -= 2 * blocks
    if G or BETA:
        if block >= 0:
            across = gl.cdiv(HV, HEADS)
            tile = block // across
            t = tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, CELLS))[:, None]
            h = (block % across) * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(0, CELLS))
            held = h < HV
            there = (t < tokens) & held[None, :]
            known = (t < used) & held[None, :]
            t = t.to(gl.int64)
            head = h.to(gl.int64)[None, :]
            cells = (t * HV + head, known, there)
            if G:
                raw = (a, t * a_t + head * a_h)
                rates = (A_log, dt_bias, h, held)
                part = (sums + tile * HV, gl.cdiv(tokens, TOKENS) * HV)
                _adjoint_gate(raw, rates, dg, da, part, cells, GATE, BIAS)
            if BETA:
                raw = (b, t * b_t + head * b_h)
                _adjoint_beta(raw, top, dbeta, db, cells, SIGMOID)


@gluon.jit(do_not_specialize=["tiles", "HV"])
def adjoint_activate_sums_kernel(sums, dA_log, ddt_bias, tiles, HV, PARTS: gl.constexpr):
    """First those of dA_log, then, with as many programs again, those of ddt_bias."""
    follow()
    across = gl.cdiv(HV, HEADS)
    which = gl.program_id(0) // across
    h = (gl.program_id(0) % across) * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(0, CELLS))
    held = h < HV
    i = gl.arange(0, PARTS, layout=gl.SliceLayout(1, CELLS))[:, None]
    at = sums + which * tiles * HV + h[None, :]
    total = gl.zeros([PARTS, HEADS], gl.float32, CELLS)
    for first in range(0, tiles, PARTS):
        there = (first + i < tiles) & held[None, :]
        total += gl.load(at + (first + i) * HV, mask=there, other=0.0)
    x = gl.sum(total, 0)
    if which == 0:
        gl.store(dA_log + h, x.to(dA_log.dtype.element_ty), mask=held)
    else:
        gl.store(ddt_bias + h, x.to(ddt_bias.dtype.element_ty), mask=held)


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
    gates = cdiv(tokens, _TOKENS) * cdiv(HV, HEADS.value)
    return Program(
        adjoint_activate_kernel,
        NORM * 2 * cdiv(tokens * H, TILE_ROWS) + (G or BETA) * gates,
        tables.device,
        tokens,
        tables.walk.used_rows,
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
        TOKENS=_TOKENS,
    )


def _sums(tables: DeviceTables, HV: int, outputs: int) -> Program:
    programs = outputs * cdiv(HV, HEADS.value)
    tiles = cdiv(tables.walk.rows, _TOKENS)
    kernel = adjoint_activate_sums_kernel
    return Program(kernel, programs, tables.device, tiles, HV, PARTS=_PARTS)


def adjoint_activate(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: Activation,
    tables: Tables,
    dq_unit: Tensor | None,
    dk_unit: Tensor | None,
    dg: Tensor | None,
    dbeta: Tensor | None,
    *,
    dq: Tensor | None,
    dk: Tensor | None,
    da: Tensor | None,
    db: Tensor | None,
    dA_log: Tensor | None,
    ddt_bias: Tensor | None,
    gate_sums: Tensor | None,
) -> None:
    held, HV = tables_of(tables), a.shape[1]
    strides = (*q.stride(), *k.stride(), *a.stride(), *b.stride())
    made = (dq_unit is not None, dg is not None, dbeta is not None)
    biased = dt_bias is not None
    rates = a if A_log is None else A_log.contiguous()
    sums = a if gate_sums is None else gate_sums
    resolved(held, _program, q.shape[1], HV, strides, made, biased, activation)(
        q,
        k,
        a,
        b,
        rates,
        rates if dt_bias is None else dt_bias.contiguous(),
        q if dq_unit is None else dq_unit,
        k if dk_unit is None else dk_unit,
        a if dg is None else dg,
        b if dbeta is None else dbeta,
        q if dq is None else dq,
        k if dk is None else dk,
        a if da is None else da,
        b if db is None else db,
        sums,
    )
    if dA_log is not None:
        outputs = (dA_log, dA_log if ddt_bias is None else ddt_bias)
        resolved(held, _sums, HV, 1 if ddt_bias is None else 2)(sums, *outputs)


VARIANTS = (
    *(
        Variant(name, adjoint_activate_kernel, 0, {**constants, "TOKENS": _TOKENS}, types=types)
        for name, constants, types in usual_inputs("adjoint_activate")
    ),
    Variant(
        "adjoint_activate, sums",
        adjoint_activate_sums_kernel,
        0,
        {"PARTS": _PARTS},
        types=dict.fromkeys(("sums", "dA_log", "ddt_bias"), "*fp32") | {"tiles": "i32"},
    ),
)
