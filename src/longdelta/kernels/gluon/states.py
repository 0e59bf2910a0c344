"""States in memory: as callers hand them over, and as a warp group reads and writes them.

Note [Addresses]: a thread holds 64 elements of a state. Split into what depends on the thread and
what depends on the element alone, their addresses are one register and 64 immediates; computed as
they come, they are 64 registers that the compiler keeps across a whole walk, or spills. The
thread's part is read from its lane here and now: derived from what is known at a kernel's start, it
would be kept, and the chunks' loop has no register to spare. (lane >> 2 and 2 (lane & 3) are where
an accumulator of wgmma has a thread's rows and columns; warps have 16 rows each.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def laid_out(state: Tensor | None) -> tuple[Tensor | None, bool]:
    """An fp32 state stored as [., HV, K, V] or as [., HV, V, K], and whether it is the latter."""
    if state is None:
        return None, False
    if state.dtype != torch.float32:
        state = state.float()
    if not state.is_contiguous() and state.transpose(-1, -2).is_contiguous():
        return state, True
    return state.contiguous(), False


@gluon.jit
def state_pointers(base, row, column, V_FIRST: gl.constexpr, L: gl.constexpr):
    """Where [64 values from a column on, 128 keys] of a state lie: Note [Addresses]."""
    v = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]
    lane = gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    base += row.to(gl.int64) * 16384
    if V_FIRST:
        own = ((v & 48) + ((lane >> 2) + column)) * 128 + (lane & 3) * 2
        pointers = base + own + ((v & 8) * 128 + (k & 121))
    else:
        own = (v & 48) + ((lane & 3) * 256 + (lane >> 2) + column)
        pointers = base + own + ((k & 121) * 128 + (v & 8))
    return pointers
