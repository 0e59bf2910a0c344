"""The single warps of gradients, and what they share with its groups.

The math, the timeline, shared memory, barriers and the Notes: gradients.py.

load_tapes: the tiles of the ring. make_vectors: vectors, Q and K, and dg and dbeta, a value head
later. store_dv: dV. trace_states: <dS, S>.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from longdelta.kernels import stages
from longdelta.kernels.gluon.dialect import async_load, barrier, reinterpret
from longdelta.kernels.gluon.tiles import LOG2E, add, from_bf16, to_bf16

GATE_FLOOR = gl.constexpr(stages.GATE_FLOOR)
RING = gl.constexpr(10)
"""Tiles that are on their way or being read."""
HEAD = gl.constexpr(7)
"""Tiles of a value head."""


@gluon.jit
def here(x):
    """x, opaque: Note [Partitions]."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def grid():
    """This program's number, and how many there are, read here: Note [Partitions]."""
    first = gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    stride = gl.inline_asm_elementwise(
        "mov.u32 $0, %nctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return first, stride


@gluon.jit
def tiles_on(s, phase, n: gl.constexpr):
    """The tile n after this one in the ring, and the parity of its barriers."""
    s += n
    if s >= RING:
        s -= RING
        phase ^= 1
    return s, phase


@gluon.jit
def _flat_tile(desc, row, ring, full, empty, s, phase):
    """Loads 64 rows of a tape into the ring's next tile; the one after it."""
    mbarrier.wait(empty.index(s), phase)
    bar = full.index(s)
    mbarrier.expect(bar, 16384)
    async_load(desc, [row, 0], bar, ring.index(s))
    return tiles_on(s, phase, 1)


@gluon.jit
def load_tapes(given):
    dod, tapes, tasks, smem = given
    sd, ud, dsd, drd = tapes
    chunks, n_tasks, H, HV, GROUP = tasks
    HV = here(HV)
    start, stride = grid()
    GROUP = here(GROUP)
    ring, full, empty = smem
    RAG: gl.constexpr = dod.layout
    s = 0
    phase = 1
    row = gl.load(chunks + start // H * 2)
    size = gl.load(chunks + start // H * 2 + 1)
    for t in range(start, n_tasks, stride):
        c = t // H
        first = (t - c * H) * GROUP
        # Of the task after this one: they are there when their time comes.
        later = gl.minimum(t + stride, n_tasks - 1) // H
        later_row = gl.load(chunks + 2 * later)
        later_size = gl.load(chunks + 2 * later + 1)
        for h in range(first, first + GROUP):
            slot = c * HV + h
            s, phase = _flat_tile(ud, slot * 64, ring, full, empty, s, phase)
            mbarrier.wait(empty.index(s), phase)
            bar = full.index(s)
            mbarrier.expect(bar, 16384)
            tile = reinterpret(ring.index(s), gl.bfloat16, [1, 64, 1, 128], RAG)
            async_load(dod, [row + size, 64 - size, h, 0], bar, tile)
            s, phase = tiles_on(s, phase, 1)
            s, phase = _flat_tile(drd, slot * 64, ring, full, empty, s, phase)
            s, phase = _flat_tile(sd, slot * 128, ring, full, empty, s, phase)
            s, phase = _flat_tile(dsd, slot * 128, ring, full, empty, s, phase)
            s, phase = _flat_tile(sd, slot * 128 + 64, ring, full, empty, s, phase)
            s, phase = _flat_tile(dsd, slot * 128 + 64, ring, full, empty, s, phase)
        row = later_row
        size = later_size


@gluon.jit
def _finish(n, at, gates, parts, left):
    """dg of value head number n of this program, from the parts that the groups left."""
    g, dg, dbeta, HV = gates
    row, size, h = at
    gs, rows, kept, columns, betas, dots = parts
    L: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 64, layout=L)
    x = n & 1
    place = row.to(gl.int64) * HV + h
    gate = gl.load(g + place + lane * HV, mask=lane < size, other=0.0)
    mbarrier.wait(left.index(x), (n >> 1) & 1)
    d = rows.index(2 * x).load(L) + rows.index(2 * x + 1).load(L)
    for y in gl.static_range(8):
        d -= columns.index(8 * x + y).load(L)
    total = gl.sum(kept.index(2 * x).load(L) + kept.index(2 * x + 1).load(L), 0)
    gamma = gl.exp2(gl.sum(gs.index(x).slice(63, 1).load(ONE), 0))
    total += gamma * gl.sum(dots.index(x).load(ONE), 0)
    d = gl.associative_scan(d + gl.where(lane == 63, total, 0.0), 0, add, reverse=True)
    d = gl.where(gate <= GATE_FLOOR, 0.0, d)
    gl.store(dg + place + lane * HV, d, mask=lane < size)
    gl.store(dbeta + place + lane * HV, betas.index(x).load(L), mask=lane < size)
    barrier()


@gluon.jit
def make_vectors(given):
    """The vectors of each value head, a head ahead; Q and K; dg."""
    qd, kd, sources, tasks, scale, smem = given
    G, g, beta, dg, dbeta = sources
    chunks, n_tasks, H, HV, GROUP = tasks
    HV = here(HV)
    start, stride = grid()
    GROUP = here(GROUP)
    qs, ks, vectors, parts, bars = smem
    gs, bs, ses, ebs, rbs = vectors
    there, left, arrived, gone = bars
    RAG: gl.constexpr = qd.layout
    L: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    lane = gl.arange(0, 64, layout=L)
    gates = (g, dg, dbeta, HV)
    n = 0
    phase = 1
    row = 0
    size = 0
    last = 0
    for t in range(start, n_tasks, stride):
        c = t // H
        hk = t - c * H
        now_row = gl.load(chunks + 2 * c)
        now_size = gl.load(chunks + 2 * c + 1)
        for h in range(hk * GROUP, hk * GROUP + GROUP):
            x = n & 1
            sums = G + (c * HV + h).to(gl.int64) * 64
            g2 = gl.load(sums + lane) * LOG2E
            end = gl.load(sums + 63) * LOG2E
            place = now_row.to(gl.int64) * HV + h
            b = gl.load(beta + place + lane * HV, mask=lane < now_size, other=0.0)
            decay = gl.exp2(g2)
            gs.index(x).store(g2)
            bs.index(x).store(b)
            ses.index(x).store(decay * scale)
            ebs.index(x).store(decay * b)
            rbs.index(x).store(gl.exp2(end - g2) * b)
            barrier()
            mbarrier.arrive(there.index(x), count=1)
            if h == hk * GROUP:
                mbarrier.wait(gone, phase)
                phase ^= 1
                mbarrier.expect(arrived, 32768)
                y = now_row + now_size
                z = 64 - now_size
                for half in gl.static_range(2):
                    k_tile = reinterpret(ks.index(half), gl.bfloat16, [1, 64, 1, 64], RAG)
                    async_load(kd, [y, z, hk, 64 * half], arrived, k_tile)
                    q_tile = reinterpret(qs.index(half), gl.bfloat16, [1, 64, 1, 64], RAG)
                    async_load(qd, [y, z, hk, 64 * half], arrived, q_tile)
            if n > 0:
                _finish(n - 1, (row, size, last), gates, parts, left)
            n += 1
            row = now_row
            size = now_size
            last = h
    _finish(n - 1, (row, size, last), gates, parts, left)


@gluon.jit
def store_dv(given):
    """dV."""
    dv, tasks, smem = given
    chunks, n_tasks, H, HV, GROUP = tasks
    HV = here(HV)
    GROUP = here(GROUP)
    start, stride = grid()
    ring, bs, bars = smem
    full, empty, there, left = bars
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    i = gl.arange(0, 16, layout=R)
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
    # A tile as the copy engine leaves it: 16 rows of 64 columns, eight times.
    pieces = reinterpret(ring, gl.bfloat16, [8 * RING, 16, 64], ring.layout)
    parts = reinterpret(bs, gl.float32, [8, 16], bs.layout)
    n = 0
    s = 2
    phase = 0
    for t in range(start, n_tasks, stride):
        c = t // H
        first = (t - c * H) * GROUP
        row = gl.load(chunks + 2 * c)
        size = gl.load(chunks + 2 * c + 1)
        for h in range(first, first + GROUP):
            x = n & 1
            mbarrier.wait(there.index(x), (n >> 1) & 1)
            mbarrier.wait(full.index(s), phase)
            at = i[:, None] * (HV * 128) + j
            to = dv + (row.to(gl.int64) * HV + h) * 128
            for y in range(4):
                b = parts.index(4 * x + y).load(R)[:, None]
                held = i + 16 * y < size
                for half in gl.static_range(2):
                    dr = from_bf16(pieces.index(8 * s + 4 * half + y).load(L))
                    gl.store(to + 64 * half + at, to_bf16(dr * b), mask=held[:, None])
                to += HV * 2048
            barrier()
            mbarrier.arrive(empty.index(s), count=3)
            mbarrier.arrive(left.index(x), count=1)
            n += 1
            s, phase = tiles_on(s, phase, HEAD)


@gluon.jit
def trace_states(given):
    """<dS, S>: the diagonal of 16 by 16 numbers, sums over every 16th key."""
    n_tasks, GROUP, smem = given
    GROUP = here(GROUP)
    start, stride = grid()
    ring, dots, sums, bars = smem
    full, empty, there, left = bars
    T: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, T, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, T, 2)
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, T))[:, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, T))[None, :]
    pieces = reinterpret(ring, gl.bfloat16, [8 * RING, 16, 64], ring.layout)
    n = 0
    s = 0
    phase = 0
    for _ in range(start, n_tasks, stride):
        for _ in range(GROUP):
            # Not read here, but not skipped: Note [Parities].
            for y in gl.static_range(3):
                mbarrier.wait(full.index(s), phase)
                barrier()
                mbarrier.arrive(empty.index(s), count=3 if y == 2 else 4)
                s, phase = tiles_on(s, phase, 1)
            dot = gl.zeros([16, 16], gl.float32, T)
            for _ in gl.static_range(2):
                d, d_phase = tiles_on(s, phase, 1)
                mbarrier.wait(full.index(s), phase)
                mbarrier.wait(full.index(d), d_phase)
                for y in range(8):
                    cotangent = pieces.index(8 * d + y).load(A)
                    state = pieces.index(8 * s + y).permute((1, 0)).load(B)
                    dot = mma_v2(cotangent, state, dot)
                # Nobody reads it: Note [Handing back].
                sums.store(gl.sum(gl.where(i == j, dot, 0.0), 1))
                barrier()
                mbarrier.arrive(empty.index(s), count=6)
                mbarrier.arrive(empty.index(d), count=6)
                s, phase = tiles_on(s, phase, 2)
            x = n & 1
            # Whoever wrote this head's vectors had read the parts of the head before the last.
            mbarrier.wait(there.index(x), (n >> 1) & 1)
            dots.index(x).store(gl.sum(gl.where(i == j, dot, 0.0), 1))
            barrier()
            mbarrier.arrive(left.index(x), count=1)
            n += 1
