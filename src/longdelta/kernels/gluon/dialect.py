"""Gluon under the names of the newest Triton: the one place that knows what older releases say.

Triton 3.9 renamed four calls that the kernels make. Kernels import them from here.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory with another element type, shape and layout."""
    view = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def follow():
    """Waits until the kernel launched before this one is done, and lets the next one begin so, too.

    Launched as dependents (runtime/launch.py, OPTIONS), kernels overlap the end of one with the
    start of the next; before this, nothing may be read or written that another kernel touches.
    The next one waits here, too: for this kernel to end, and so for all before it. The warps that
    begin a kernel wait; the others start when those let them.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
