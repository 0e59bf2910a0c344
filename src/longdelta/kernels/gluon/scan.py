"""scan: state and output, one chunk after another, every segment from its own S_in.

    W = V - E K S        Uh = W + (Gam * Z * b_j) W        O = s E Q S + (s Gam * Q K^T * b_j) Uh
    S <- gamma S + K^T (r b Uh)
One program walks one (segment, value head) after another. The state is held transposed, 64 value
rows x 128 keys of fp32 in each of two warp groups, and is itself the register operand of the
products with K and Q, so it never passes through shared memory. Per chunk and group three waits:
[K S, Q S], [(Gam Z b) W], [K^T r b Uh, P Uh]. A third group makes Gam Z b and P = s Gam Q K^T b, a
single warp loads. Barriers: full (the tiles and vectors of a stage have come), ready (Gam Z b and P
are made), empty (both state groups are done with the stage).
The tapes S and Uh come from the same instructions whether or not o is wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longdelta.kernels.gluon.states import laid_out, state_pointers
from longdelta.kernels.gluon.tables import tables_of
from longdelta.kernels.gluon.tiles import LOG2E, flat, in_place, ragged, to_bf16
from longdelta.kernels.stages import Tables
from longdelta.runtime.launch import launch, programs


@gluon.jit
def _load(
    loads, vectors, tasks, chunks, n_tasks, HV, GROUP, smem, OUT: gl.constexpr, STAGES: gl.constexpr
):
    qd, kd, vd, zd = loads
    Gp, bp = vectors
    qs, ks, v0s, v1s, zs, gs, bs, rs, full, empty = smem
    RAG: gl.constexpr = qd.layout
    TILES: gl.constexpr = 3 if OUT else 2
    lane = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    it = 0
    for t in range(gl.program_id(0), n_tasks, gl.num_programs(0)):
        seg = t // HV
        h = t - seg * HV
        first = gl.load(tasks + seg * 8)
        n = gl.load(tasks + seg * 8 + 1)
        hk = h // GROUP
        for c in range(first, first + n):
            row = gl.load(chunks + 2 * c)
            size = gl.load(chunks + 2 * c + 1)
            slot = c * HV + h
            g = Gp + slot.to(gl.int64) * 64
            g2 = gl.load(g + lane) * LOG2E
            last = gl.load(g + 63) * LOG2E
            b = gl.load(bp + (row + lane).to(gl.int64) * HV + h, mask=lane < size, other=0.0)
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, TILES * 16384 + 8192)
            y = row + size
            x = 64 - size
            k_tile = ks.index(s)._reinterpret(gl.bfloat16, [1, 64, 1, 128], RAG)
            tma.async_copy_global_to_shared(kd, [y, x, hk, 0], bar, k_tile)
            if OUT:
                q_tile = qs.index(s)._reinterpret(gl.bfloat16, [1, 64, 1, 128], RAG)
                tma.async_copy_global_to_shared(qd, [y, x, hk, 0], bar, q_tile)
            tma.async_copy_global_to_shared(zd, [slot * 64, 0], bar, zs.index(s))
            v0 = v0s.index(s)._reinterpret(gl.bfloat16, [1, 64, 1, 64], RAG)
            v1 = v1s.index(s)._reinterpret(gl.bfloat16, [1, 64, 1, 64], RAG)
            tma.async_copy_global_to_shared(vd, [y, x, h, 0], bar, v0)
            tma.async_copy_global_to_shared(vd, [y, x, h, 64], bar, v1)
            gs.index(s).store(g2)
            bs.index(s).store(b)
            rs.index(s).store(b * gl.exp2(last - g2))
            gl.thread_barrier()
            mbarrier.arrive(bar, count=1)
            it += 1


@gluon.jit
def _within(tasks, n_tasks, HV, scale, smem, OUT: gl.constexpr, STAGES: gl.constexpr):
    """Gam Z b over Z in place, and P b."""
    qs, ks, zs, ps, gs, bs, full, ready = smem
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    gz = zs._reinterpret(gl.bfloat16, [STAGES, 64, 64], zs.layout)
    it = 0
    for t in range(gl.program_id(0), n_tasks, gl.num_programs(0)):
        n = gl.load(tasks + (t // HV) * 8 + 1)
        for _ in range(n):
            s = it % STAGES
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
            if OUT:
                a = gl.zeros([64, 64], gl.float32, L)
                a = warpgroup_mma(
                    qs.index(s), ks.index(s).permute((1, 0)), a, use_acc=False, is_async=True
                )
            gi = gs.index(s).load(gl.SliceLayout(1, L))
            gj = gs.index(s).load(gl.SliceLayout(0, L))
            gam = gl.exp2(
                gl.where(i[:, None] >= j[None, :], gi[:, None] - gj[None, :], float("-inf"))
            )
            gam = gam * bs.index(s).load(gl.SliceLayout(0, L))[None, :]
            z = to_bf16(zs.index(s).load(L).to(gl.float32) * gam)
            gl.thread_barrier()
            gz.index(s).store(z)
            if OUT:
                a = warpgroup_mma_wait(0, [a])
                ps.index(s).store(to_bf16(a * (gam * scale)))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(s), count=1)
            it += 1


@gluon.jit
def _walk(
    stores,
    states,
    tasks,
    chunks,
    n_tasks,
    HV,
    scale,
    smem,
    COLUMN: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    OUT: gl.constexpr,
    TAPES: gl.constexpr,
    STAGES: gl.constexpr,
):
    od, sd, ud = stores
    border, initial, final = states
    qs, ks, vs, zs, ps, gs, rs, out, snap, tape, full, empty, ready = smem
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LU: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AU: gl.constexpr = gl.DotOperandLayout(0, LU, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    CU: gl.constexpr = gl.SliceLayout(0, LU)
    PENDING: gl.constexpr = (1 if OUT else 0) + (2 if TAPES else 0) - 1
    gz = zs._reinterpret(gl.bfloat16, [STAGES, 64, 64], zs.layout)
    it = 0
    for t in range(gl.program_id(0), n_tasks, gl.num_programs(0)):
        seg = t // HV
        h = t - seg * HV
        first = gl.load(tasks + seg * 8)
        n = gl.load(tasks + seg * 8 + 1)
        start = gl.load(tasks + seg * 8 + 2)
        end = gl.load(tasks + seg * 8 + 3)
        enter = gl.load(tasks + seg * 8 + 4)
        S = gl.zeros([64, 128], gl.float32, LS)
        if enter >= 0:
            S = gl.load(state_pointers(border, enter * HV + h, COLUMN, False, LS))
        elif INITIAL:
            S = gl.load(state_pointers(initial, start * HV + h, COLUMN, V_FIRST, LS))
        for c in range(first, first + n):
            s = it % STAGES
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
            k = ks.index(s)
            Sb = to_bf16(S)
            a = gl.convert_layout(Sb, AU)
            u = gl.zeros([64, 64], gl.float32, LU)
            u = warpgroup_mma(a, k.permute((1, 0)), u, use_acc=False, is_async=True)
            if OUT:
                o = gl.zeros([64, 64], gl.float32, LU)
                o = warpgroup_mma(a, qs.index(s).permute((1, 0)), o, use_acc=False, is_async=True)
            if TAPES:
                tma.store_wait(PENDING)
                gl.thread_barrier()
                snap.permute((1, 0)).store(Sb)
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(sd, [(c * HV + h) * 128, COLUMN], snap)
            gamma = gl.exp2(
                gl.sum(gs.index(s).slice(63, 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            )
            v = vs.index(s).permute((1, 0)).load(LU)
            if OUT:
                done = warpgroup_mma_wait(0, [u, o, a])
                u = done[0]
                o1 = done[1]
            else:
                u = warpgroup_mma_wait(0, [u, a])[0]
            e = gl.exp2(gs.index(s).load(CU))
            w = v.to(gl.float32) - u * e[None, :]
            wb = gl.convert_layout(to_bf16(w), AU)
            mbarrier.wait(ready.index(s), (it // STAGES) & 1)
            w = warpgroup_mma(wb, gz.index(s).permute((1, 0)), w, is_async=True)
            S = S * gamma
            if OUT:
                o2 = o1 * (e * scale)[None, :]
            w = warpgroup_mma_wait(0, [w, wb])[0]
            Uh = to_bf16(w)
            x = gl.convert_layout(to_bf16(w * rs.index(s).load(CU)[None, :]), AS)
            S = warpgroup_mma(x, k, S, is_async=True)
            if OUT:
                y = gl.convert_layout(Uh, AU)
                o2 = warpgroup_mma(y, ps.index(s).permute((1, 0)), o2, is_async=True)
            if TAPES:
                tma.store_wait(PENDING)
                gl.thread_barrier()
                tape.permute((1, 0)).store(Uh)
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(ud, [(c * HV + h) * 64, COLUMN], tape)
            if OUT:
                row = gl.load(chunks + 2 * c)
                size = gl.load(chunks + 2 * c + 1)
                done = warpgroup_mma_wait(0, [S, o2, x, y])
                S = done[0]
                o3 = done[1]
                tma.store_wait(PENDING)
                gl.thread_barrier()
                mbarrier.arrive(empty.index(s), count=1)
                out.permute((1, 0)).store(to_bf16(o3))
                fence_async_shared()
                gl.thread_barrier()
                tile = out._reinterpret(gl.bfloat16, [1, 64, 1, 64], od.layout)
                tma.async_copy_shared_to_global(od, [row + size, 64 - size, h, COLUMN], tile)
            else:
                S = warpgroup_mma_wait(0, [S, x])[0]
                gl.thread_barrier()
                mbarrier.arrive(empty.index(s), count=1)
            it += 1
        if FINAL:
            if end >= 0:
                gl.store(state_pointers(final, end * HV + h, COLUMN, V_FIRST, LS), S)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_tasks", "HV", "GROUP"])
def scan_kernel(
    qd,
    kd,
    vd,
    zd,
    od,
    sd,
    ud,
    G,
    beta,
    border,
    initial,
    final,
    tasks,
    chunks,
    n_tasks,
    HV,
    GROUP,
    scale,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    OUT: gl.constexpr,
    TAPES: gl.constexpr,
    STAGES: gl.constexpr,
):
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    v0s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    v1s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    zs = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], tile)
    qs = ks
    ps = v0s
    out0 = v0s.index(0)
    out1 = v0s.index(0)
    snap0 = ks.index(0)._reinterpret(gl.bfloat16, [128, 64], tile)
    snap1 = snap0
    tape0 = v0s.index(0)
    tape1 = v0s.index(0)
    if OUT:
        qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
        ps = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
        out0 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
        out1 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    if TAPES:
        snap0 = gl.allocate_shared_memory(gl.bfloat16, [128, 64], tile)
        snap1 = gl.allocate_shared_memory(gl.bfloat16, [128, 64], tile)
        tape0 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
        tape1 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    bs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    rs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=2)
        mbarrier.init(ready.index(s), count=1)
    stores = (od, sd, ud)
    states = (border, initial, final)
    group0 = (qs, ks, v0s, zs, ps, gs, rs, out0, snap0, tape0, full, empty, ready)
    group1 = (qs, ks, v1s, zs, ps, gs, rs, out1, snap1, tape1, full, empty, ready)
    loads = (qd, kd, vd, zd)
    ring = (qs, ks, v0s, v1s, zs, gs, bs, rs, full, empty)
    inside = (qs, ks, zs, ps, gs, bs, full, ready)
    gl.warp_specialize(
        [
            (
                _walk,
                (
                    stores,
                    states,
                    tasks,
                    chunks,
                    n_tasks,
                    HV,
                    scale,
                    group0,
                    0,
                    INITIAL,
                    FINAL,
                    V_FIRST,
                    OUT,
                    TAPES,
                    STAGES,
                ),
            ),
            (
                _walk,
                (
                    stores,
                    states,
                    tasks,
                    chunks,
                    n_tasks,
                    HV,
                    scale,
                    group1,
                    64,
                    INITIAL,
                    FINAL,
                    V_FIRST,
                    OUT,
                    TAPES,
                    STAGES,
                ),
            ),
            (_within, (tasks, n_tasks, HV, scale, inside, OUT, STAGES)),
            (_load, (loads, (G, beta), tasks, chunks, n_tasks, HV, GROUP, ring, OUT, STAGES)),
        ],
        [4, 4, 1],
        [192, 104, 24],
    )


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    G: Tensor,
    Z: Tensor,
    S_border: Tensor,
    initial_state: Tensor | None,
    scale: float,
    tables: Tables,
    *,
    o: Tensor | None,
    final_state: Tensor | None,
    S: Tensor | None,
    Uh: Tensor | None,
) -> None:
    if o is not None and tables.walk.used_rows < o.shape[0]:
        o[tables.walk.used_rows :] = 0
    device = tables_of(tables)
    tasks = device.scan
    HV, H = v.shape[1], k.shape[1]
    if not tasks.count:
        return
    final, v_first = laid_out(final_state)
    initial, initial_v_first = laid_out(initial_state)
    if initial is not None and final is not None and initial_v_first != v_first:
        initial = initial.transpose(-1, -2).contiguous().transpose(-1, -2)
        if not v_first:
            initial = initial.contiguous()
    elif final is None:
        v_first = initial_v_first
    q, k, v = (in_place(x.to(torch.bfloat16)) for x in (q, k, v))
    written = None if o is None else in_place(o)
    out, taped = o is not None, S is not None
    qd, kd, vd = ragged(q, 128), ragged(k, 128), ragged(v, 64)
    zd = flat(Z, 64, 64)
    od = vd if written is None else ragged(written, 64)
    sd = flat(k, 128, 64) if S is None else flat(S, 128, 64)
    ud = flat(k, 64, 64) if Uh is None else flat(Uh, 64, 64)
    walks = tasks.count * HV
    launch(
        scan_kernel,
        programs(walks, tasks.longest, v.device),
        v,
        qd,
        kd,
        vd,
        zd,
        od,
        sd,
        ud,
        G,
        beta,
        S_border,
        S_border if initial is None else initial,
        S_border if final is None else final,
        tasks.rows,
        device.chunks,
        walks,
        HV,
        HV // H,
        scale,
        INITIAL=initial is not None,
        FINAL=final is not None,
        V_FIRST=v_first,
        OUT=out,
        TAPES=taped,
        STAGES=2 if out and taped else 3,
    )
    if written is not o and written is not None and o is not None:
        o.copy_(written)
    if final is not None and final is not final_state and final_state is not None:
        final_state.copy_(final)
