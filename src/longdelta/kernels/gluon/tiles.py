"""What the kernels share: chunk size, packed conversions, and tile descriptors.

Note [Ragged tiles]: a chunk holds `size` rows of a packed tensor from `row` on, a tile has 64. A
tensor [T, heads, d] is described to the copy engine as [T + 1, 64, heads, d] with the row's stride
twice and a base 64 rows early, so that coordinates (row + size, 64 - size, head, 0) name rows from
`row` on and leave the box after `size` of them: loads fill with zeros, stores write nothing, and no
kernel needs a path for tails.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)

FLAT = gl.NVMMASharedLayout(128, 16, rank=2)
RAGGED = gl.NVMMASharedLayout(128, 16, rank=4)


@gluon.jit
def to_bf16(x):
    """Two values to one register with one instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
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
def split_product(a, b, acc):
    """acc + a b of fp32 operands, each split into a bf16 head and tail: 16 bits of both."""
    a_head = to_bf16(a)
    b_head = to_bf16(b)
    acc = mma_v2(to_bf16(a - a_head.to(gl.float32)), b_head, acc)
    acc = mma_v2(a_head, to_bf16(b - b_head.to(gl.float32)), acc)
    return mma_v2(a_head, b_head, acc)


@dataclass(frozen=True)
class _Shifted:
    """A tensor's memory, seen from an address before it."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def ragged(x: Tensor, columns: int) -> TensorDescriptor:
    """[64, columns] tiles of one head of x [T, heads, d]: Note [Ragged tiles]."""
    rows, heads, width = x.shape
    row = x.stride(0) if rows > 1 else heads * width
    head = x.stride(1) if heads > 1 else width
    base = _Shifted(x.dtype, x.data_ptr() - 64 * row * x.element_size())
    shape, strides = [rows + 1, 64, heads, width], [row, row, head, 1]
    return TensorDescriptor(base, shape, strides, [1, 64, 1, columns], RAGGED)


def flat(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """[rows, columns] tiles of a contiguous tensor, all its leading axes taken as rows."""
    width = x.shape[-1]
    shape = [max(1, x.numel() // width), width]
    return TensorDescriptor(x, shape, [width, 1], [rows, columns], FLAT)


def in_place(x: Tensor) -> Tensor:
    """x itself where the copy engine can read it: 16-byte rows and heads, unit last stride."""
    aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    aligned = aligned and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    return x if aligned else x.contiguous()
