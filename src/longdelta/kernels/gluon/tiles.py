"""What the kernels share: chunk size, packed conversions, and tile descriptors.

Note [Ragged tiles]: a chunk holds `size` rows of a packed tensor from `row` on, a tile has 64. A
tensor [T, heads, d] is described to the copy engine as [T + 1, 64, heads, d] with the row's stride
twice and a base 64 rows early, so that coordinates (row + size, 64 - size, head, 0) name rows from
`row` on and leave the box after `size` of them: loads fill with zeros, stores write nothing, and no
kernel needs a path for tails.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from longdelta.kernels.gluon.dialect import async_store, barrier, reinterpret
from longdelta.runtime.driver import Tile

LOG2E = gl.constexpr(1.4426950408889634)

FLAT = gl.NVMMASharedLayout(128, 16, rank=2)
FLAT_FP32 = gl.NVMMASharedLayout(128, 32, rank=2)
RAGGED = gl.NVMMASharedLayout(128, 16, rank=4)


@gluon.jit
def add(a, b):
    """For sums along an axis."""
    return a + b


@gluon.jit
def to_bf16(x):
    """Two values to one register with one instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def from_bf16(x):
    """Two values of one register, each with one instruction."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=&r,=&r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def to_fp16(x):
    """Saturating: what lies beyond the range becomes the largest number, not infinity."""
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [x],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def decays(gi, gj, i, j, x):
    """2^(gi - gj) where i >= 16 x + j, else 0: a quarter of the columns.

    The thread's share stands on one side, constants on the other: states.py, Note [Addresses].
    """
    own = (i & 55)[:, None] - (j & 6)[None, :]
    below = own >= (j & 9)[None, :] + 16 * x - (i & 8)[:, None]
    return gl.exp2(gl.where(below, gi - gj, float("-inf")))


@gluon.jit
def put(desc, at, out, x, PENDING: gl.constexpr):
    """x, transposed, out to where a descriptor has `at`, through `out` in shared memory: once all
    but the PENDING latest stores have read theirs."""
    tma.store_wait(PENDING)
    barrier()
    out.permute((1, 0)).store(x)
    fence_async_shared()
    barrier()
    async_store(desc, at, reinterpret(out, gl.bfloat16, desc.block_type.shape, desc.layout))


@gluon.jit
def ask_for_vectors(chunks, G, beta, lane, c, HV, h):
    """Row and size of a chunk; G of one head, its last and beta, on their way into registers.

    A loader that waits for them takes 1.1 us a chunk, nearly as long as half a walk; so it asks
    while it loads the chunk before. docs/log.md, 2026-12-01, what holds up half a walk.
    """
    row = gl.load(chunks + 2 * c)
    size = gl.load(chunks + 2 * c + 1)
    g = G + (c * HV + h).to(gl.int64) * 64
    b = gl.load(beta + (row + lane).to(gl.int64) * HV + h, mask=lane < size, other=0.0)
    return row, size, gl.load(g + lane), gl.load(g + 63), b


@gluon.jit
def next_stage(s, phase, STAGES: gl.constexpr):
    """The stage after this one, and the parity of its barriers: carried, since a remainder is an
    offset per thread and tile that the compiler would carry."""
    s += 1
    if s == STAGES:
        s = 0
        phase ^= 1
    return s, phase


@gluon.jit
def _halves(x, L: gl.constexpr):
    """The left and the right columns of a warp group's values, in the registers they are in."""
    a, b = x.reshape([64, 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(
        b, L, assert_trivial=True
    )


@gluon.jit
def quarters(x, H: gl.constexpr, Q: gl.constexpr):
    """The columns in four parts, likewise; H, Q: layouts of halves and quarters."""
    a, b = _halves(x, H)
    return _halves(a, Q) + _halves(b, Q)


@gluon.jit
def _joined(a, b, L: gl.constexpr):
    """What `_halves` took apart."""
    x = gl.join(a, b).permute((0, 2, 1)).reshape([64, 2 * a.shape[1]])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def whole(x, H: gl.constexpr, L: gl.constexpr):
    """What `quarters` took apart."""
    return _joined(_joined(x[0], x[1], H), _joined(x[2], x[3], H), L)


# A model's tensors come back to the addresses of its last step: their tiles are known, and encoded.
@lru_cache(maxsize=2048)
def _ragged(
    dtype: torch.dtype,
    address: int,
    rows: int,
    heads: int,
    width: int,
    row: int,
    head: int,
    columns: int,
) -> Tile:
    ahead = 64 * row * dtype.itemsize
    shape, strides = [rows + 1, 64, heads, width], [row, row, head, 1]
    return Tile(dtype, address - ahead, shape, strides, [1, 64, 1, columns], RAGGED, ahead)


def ragged(x: Tensor, columns: int) -> Tile:
    """[64, columns] tiles of one head of x [T, heads, d]: Note [Ragged tiles]."""
    (rows, heads, width), (row, head, _) = x.shape, x.stride()
    row = row if rows > 1 else heads * width
    head = head if heads > 1 else width
    return _ragged(x.dtype, x.data_ptr(), rows, heads, width, row, head, columns)


@lru_cache(maxsize=2048)
def _flat(
    dtype: torch.dtype, address: int, elements: int, width: int, rows: int, columns: int
) -> Tile:
    shape = [max(1, elements // width), width]
    layout = FLAT if dtype.itemsize == 2 else FLAT_FP32
    return Tile(dtype, address, shape, [width, 1], [rows, columns], layout)


def flat(x: Tensor, rows: int, columns: int) -> Tile:
    """[rows, columns] tiles of a contiguous tensor, all its leading axes taken as rows."""
    return _flat(x.dtype, x.data_ptr(), x.numel(), x.shape[-1], rows, columns)


def in_place(x: Tensor) -> Tensor:
    """x [T, heads, d] itself where the copy engine can read it, else a copy: bf16, 16-byte rows and
    heads, unit last stride."""
    row, head, last = x.stride()
    aligned = row > 0 and head > 0 and not (x.data_ptr() | 2 * row | 2 * head) & 15
    if aligned and last == 1 and x.dtype == torch.bfloat16:
        return x
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device).copy_(x)
