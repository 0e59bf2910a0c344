"""Gluon under the names of the newest Triton: the one place that knows what older releases say.

Triton 3.9 renamed four calls that the kernels make. Kernels import them from here.
"""

from __future__ import annotations

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
