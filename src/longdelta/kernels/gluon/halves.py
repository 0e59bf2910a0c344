"""Walks of scan and adjoint_scan as tasks of programs, whole or in halves.

Note [Halves]: a state is walked by two warp groups that hold 64 of its values each and need nothing
of one another. They share a program, which loads and prepares for both, or are tasks of their own
in programs with one such group. Half a walk takes less time a chunk, two of them more. So walks go
apart where whole ones leave multiprocessors idle: few heads, short documents, documents of very
different lengths. A value's bits are the same.
"""

from __future__ import annotations

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longdelta.kernels.gluon.tables import DeviceTables
from longdelta.plan.span import span
from longdelta.runtime import launch

APART = 0.75
"""What half a walk takes a chunk, in a program of its own, as a part of what a whole one takes:
docs/log.md, 2026-11-30, halves of walks."""


def groups_of(tables: DeviceTables, HV: int) -> int:
    """State groups of a program: 2, or 1 where that ends sooner."""
    chunks, places = tables.scan.chunks, launch.multiprocessors(tables.device)
    # Whole walks end by share + longest: not worth a look where there are many.
    share = tables.walk.chunks * HV / places
    if (2 * APART - 1) * share >= tables.scan.longest:
        return 2
    ends = partial(span, chunks, places=places, in_turn=tables.scan.longest <= launch.IN_TURN)
    return 1 if APART * ends(2 * HV) < ends(HV) else 2


@gluon.jit
def walk_of(t, HV, GROUPS: gl.constexpr):
    """Segment, value head and, where a program has one state group, first value of a task."""
    column = 0
    if GROUPS == 1:
        column = (t & 1) * 64
        t = t >> 1
    seg = t // HV
    return seg, t - seg * HV, column
