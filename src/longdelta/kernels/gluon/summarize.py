"""summarize: what a segment does to the state that enters it, S_out = M S_in + S_ext.

Chunk by chunk, with X = D (I + Z^T D) K:
    S <- gamma S - X^T (gamma K S - r V)        M <- gamma (M - X^T K M)
M is the same walk without V, from the identity. One program walks S or M of one (segment, value
head), held transposed in registers like scan's state, 64 rows in each of two warp groups; a third
group makes X, a single warp loads. Two waits a chunk: [K S], [X^T error]. Barriers: full (a stage
has come), ready and x_free (X made and read), empty (both groups are done with the stage).
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
def _load(loads, vectors, tasks, chunks, walks, HV, GROUP, smem, STAGES: gl.constexpr):
    kd, vd, zd = loads
    Gp, bp = vectors
    ks, v0s, v1s, zs, gs, bs, rs, full, empty = smem
    RAG: gl.constexpr = kd.layout
    lane = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    it = 0
    for t in range(gl.program_id(0), walks, gl.num_programs(0)):
        task = tasks + (t // HV) * 8
        h = t - (t // HV) * HV
        first = gl.load(task)
        n = gl.load(task + 1)
        with_values = gl.load(task + 3) == 0
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
            y = row + size
            x = 64 - size
            k_tile = ks.index(s)._reinterpret(gl.bfloat16, [1, 64, 1, 128], RAG)
            if with_values:
                mbarrier.expect(bar, 2 * 16384 + 8192)
                v0 = v0s.index(s)._reinterpret(gl.bfloat16, [1, 64, 1, 64], RAG)
                v1 = v1s.index(s)._reinterpret(gl.bfloat16, [1, 64, 1, 64], RAG)
                tma.async_copy_global_to_shared(vd, [y, x, h, 0], bar, v0)
                tma.async_copy_global_to_shared(vd, [y, x, h, 64], bar, v1)
            else:
                mbarrier.expect(bar, 16384 + 8192)
            tma.async_copy_global_to_shared(kd, [y, x, hk, 0], bar, k_tile)
            tma.async_copy_global_to_shared(zd, [slot * 64, 0], bar, zs.index(s))
            gs.index(s).store(g2)
            bs.index(s).store(b)
            rs.index(s).store(gl.exp2(last - g2))
            gl.thread_barrier()
            mbarrier.arrive(bar, count=1)
            it += 1


@gluon.jit
def _transfer(tasks, walks, HV, smem, STAGES: gl.constexpr, X_STAGES: gl.constexpr):
    """X of every chunk."""
    ks, zs, bs, xs, full, ready, x_free = smem
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, A))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, A))[None, :]
    it = 0
    for t in range(gl.program_id(0), walks, gl.num_programs(0)):
        n = gl.load(tasks + (t // HV) * 8 + 1)
        for _ in range(n):
            s = it % STAGES
            x = it % X_STAGES
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
            b = bs.index(s).load(gl.SliceLayout(0, A))
            link = zs.index(s).permute((1, 0)).load(A).to(gl.float32) * b[None, :]
            link = to_bf16(gl.where(i == j, 1.0, link))
            keys = gl.zeros([64, 128], gl.float32, L)
            keys = warpgroup_mma(link, ks.index(s), keys, use_acc=False, is_async=True)
            keys = warpgroup_mma_wait(0, [keys, link])[0]
            keys = keys * bs.index(s).load(gl.SliceLayout(1, L))[:, None]
            mbarrier.wait(x_free.index(x), ((it // X_STAGES) & 1) ^ 1)
            xs.index(x).store(to_bf16(keys))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(x), count=1)
            it += 1


@gluon.jit
def _walk(
    states,
    tasks,
    walks,
    HV,
    smem,
    COLUMN: gl.constexpr,
    INITIAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    border, transition, initial = states
    ks, vs, gs, rs, xs, full, empty, ready, x_free = smem
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LU: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AU: gl.constexpr = gl.DotOperandLayout(0, LU, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    CU: gl.constexpr = gl.SliceLayout(0, LU)
    vi = gl.arange(0, 64, layout=gl.SliceLayout(1, LS))[:, None] + COLUMN
    ki = gl.arange(0, 128, layout=gl.SliceLayout(0, LS))[None, :]
    it = 0
    for t in range(gl.program_id(0), walks, gl.num_programs(0)):
        task = tasks + (t // HV) * 8
        h = t - (t // HV) * HV
        n = gl.load(task + 1)
        start = gl.load(task + 2)
        is_map = gl.load(task + 3)
        target = gl.load(task + 4)
        S = gl.where((vi == ki) & (is_map != 0), 1.0, gl.zeros([64, 128], gl.float32, LS))
        if INITIAL:
            if start >= 0:
                S = gl.load(state_pointers(initial, start * HV + h, COLUMN, V_FIRST, LS))
        for _ in range(n):
            s = it % STAGES
            x = it % X_STAGES
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
            a = gl.convert_layout(to_bf16(S), AU)
            u = gl.zeros([64, 64], gl.float32, LU)
            u = warpgroup_mma(a, ks.index(s).permute((1, 0)), u, use_acc=False, is_async=True)
            last = gl.sum(gs.index(s).slice(63, 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            gamma = gl.exp2(last)
            error = gl.zeros([64, 64], gl.float32, LU)
            if is_map == 0:
                v = vs.index(s).permute((1, 0)).load(LU).to(gl.float32)
                error = v * rs.index(s).load(CU)[None, :]
            u = warpgroup_mma_wait(0, [u, a])[0]
            error = error - gamma * u
            e = gl.convert_layout(to_bf16(error), AS)
            S = S * gamma
            mbarrier.wait(ready.index(x), (it // X_STAGES) & 1)
            S = warpgroup_mma(e, xs.index(x), S, is_async=True)
            S = warpgroup_mma_wait(0, [S, e])[0]
            gl.thread_barrier()
            mbarrier.arrive(empty.index(s), count=1)
            mbarrier.arrive(x_free.index(x), count=1)
            it += 1
        if is_map == 0:
            gl.store(state_pointers(border, target * HV + h, COLUMN, False, LS), S)
        else:
            gl.store(state_pointers(transition, target * HV + h, COLUMN, False, LS), S)


@gluon.jit(do_not_specialize=["walks", "HV", "GROUP"])
def summarize_kernel(
    kd,
    vd,
    zd,
    G,
    beta,
    border,
    transition,
    initial,
    tasks,
    chunks,
    walks,
    HV,
    GROUP,
    INITIAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    v0s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    v1s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    zs = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], tile)
    xs = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, 64, 128], tile)
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    bs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    rs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], bar)
    x_free = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], bar)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=2)
    for x in gl.static_range(X_STAGES):
        mbarrier.init(ready.index(x), count=1)
        mbarrier.init(x_free.index(x), count=2)
    states = (border, transition, initial)
    group0 = (ks, v0s, gs, rs, xs, full, empty, ready, x_free)
    group1 = (ks, v1s, gs, rs, xs, full, empty, ready, x_free)
    ring = (ks, v0s, v1s, zs, gs, bs, rs, full, empty)
    inside = (ks, zs, bs, xs, full, ready, x_free)
    gl.warp_specialize(
        [
            (_walk, (states, tasks, walks, HV, group0, 0, INITIAL, V_FIRST, STAGES, X_STAGES)),
            (_walk, (states, tasks, walks, HV, group1, 64, INITIAL, V_FIRST, STAGES, X_STAGES)),
            (_transfer, (tasks, walks, HV, inside, STAGES, X_STAGES)),
            (_load, ((kd, vd, zd), (G, beta), tasks, chunks, walks, HV, GROUP, ring, STAGES)),
        ],
        [4, 4, 1],
        [168, 144, 24],
    )


_STAGES, _X_STAGES = 3, 2
"""Chunks that are loaded ahead, and X that are made ahead."""


def summarize(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    G: Tensor,
    Z: Tensor,
    initial_state: Tensor | None,
    tables: Tables,
    *,
    S_border: Tensor,
    M: Tensor,
) -> None:
    device = tables_of(tables)
    tasks = device.summarize
    HV, H = v.shape[1], k.shape[1]
    initial, v_first = laid_out(initial_state)
    k, v = in_place(k.to(torch.bfloat16)), in_place(v.to(torch.bfloat16))
    walks = tasks.count * HV
    launch(
        summarize_kernel,
        programs(walks, tasks.longest, v.device),
        v,
        ragged(k, 128),
        ragged(v, 64),
        flat(Z, 64, 64),
        G,
        beta,
        S_border,
        M if M.numel() else S_border,
        S_border if initial is None else initial,
        tasks.rows,
        device.chunks,
        walks,
        HV,
        HV // H,
        INITIAL=initial is not None,
        V_FIRST=v_first,
        STAGES=_STAGES,
        X_STAGES=_X_STAGES,
    )
