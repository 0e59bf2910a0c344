"""adjoint_summarize: the cotangent that leaves a segment backwards, dS_in = M^T dS_out + dS_ext.

Chunk by chunk from the end, with X' = D (I + Z D) K and R = s E (Q - tril(Q K^T) X'):
    dS <- gamma dS - X'^T (gamma K dS) + R^T dO
The last segment of a document is walked from the cotangent of its final state, others from zero;
M is the forward's. What the gates have made negligible at the segment's start is left out: with b_c
the bound of chunk c's transition, the cotangent after chunk c is forgotten where b_first + .. + b_c
<= -20. A walk starts, from zero, with the chunk after the last cotangent that is not.

One program walks one (segment, value head), dS transposed in registers like scan's state, 64 values
in each of two warp groups; a third group makes X' and R, a single warp loads. It is found where to
start before the groups part. Two waits a chunk: [K dS], then [X'^T error, R^T dO]. Barriers: full
(a stage has come), ready and x_free (X' and R made; X' read), empty (both groups are done with the
stage). Shared memory: a ring of three stages of 56 KB (Q, K, dO, Z), R in the place of Q; two of
X', 32 KB.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longdelta.kernels.gluon.dialect import async_load, barrier, follow, reinterpret
from longdelta.kernels.gluon.states import laid_out, state_pointers
from longdelta.kernels.gluon.summarize import FORGOTTEN
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import LOG2E, add, flat, in_place, next_stage, ragged, to_bf16
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import Tables
from longdelta.runtime.launch import Program, resolved


@gluon.jit
def _last_needed(bound, n, HV):
    """The last of a segment's n + 1 cotangents, one before each chunk and one at the end, that
    counts at its start; one of NaN does."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    needed = 0
    earlier = 0.0
    for block in range((n + 127) // 128):
        c = block * 128 + lane
        x = gl.load(bound + c.to(gl.int64) * HV, mask=c < n, other=0.0)
        decay = gl.associative_scan(x, 0, add) + earlier
        counts = gl.where((c >= n) | (decay <= FORGOTTEN), 0, c + 1)
        needed = gl.maximum(needed, gl.max(counts, 0))
        earlier += gl.sum(x, 0)
    return needed


@gluon.jit
def _load(loads, vectors, table, n, smem, STAGES: gl.constexpr):
    qd, kd, dod, zd = loads
    Gp, bp = vectors
    chunks, first, h, HV, GROUP = table
    qs, ks, d0s, d1s, zs, bs, es, ls, full, empty = smem
    RAG: gl.constexpr = kd.layout
    lane = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    hk = h // GROUP
    s = 0
    phase = 0
    for it in range(n):
        c = first + n - 1 - it
        row = gl.load(chunks + 2 * c)
        size = gl.load(chunks + 2 * c + 1)
        slot = c * HV + h
        g = Gp + slot.to(gl.int64) * 64
        g2 = gl.load(g + lane) * LOG2E
        last = gl.load(g + 63) * LOG2E
        b = gl.load(bp + (row + lane).to(gl.int64) * HV + h, mask=lane < size, other=0.0)
        bar = full.index(s)
        y = row + size
        x = 64 - size
        mbarrier.wait(empty.index(s), phase ^ 1)
        mbarrier.expect(bar, 3 * 16384 + 8192)
        k_tile = reinterpret(ks.index(s), gl.bfloat16, [1, 64, 1, 128], RAG)
        q_tile = reinterpret(qs.index(s), gl.bfloat16, [1, 64, 1, 128], RAG)
        async_load(kd, [y, x, hk, 0], bar, k_tile)
        async_load(zd, [slot * 64, 0], bar, zs.index(s))
        async_load(qd, [y, x, hk, 0], bar, q_tile)
        d0 = reinterpret(d0s.index(s), gl.bfloat16, [1, 64, 1, 64], RAG)
        d1 = reinterpret(d1s.index(s), gl.bfloat16, [1, 64, 1, 64], RAG)
        async_load(dod, [y, x, h, 0], bar, d0)
        async_load(dod, [y, x, h, 64], bar, d1)
        bs.index(s).store(b)
        es.index(s).store(gl.exp2(g2))
        ls.index(s).store(gl.exp2(last + gl.zeros_like(g2)))
        barrier()
        mbarrier.arrive(bar, count=1)
        s, phase = next_stage(s, phase, STAGES)


@gluon.jit
def _transfer(n, scale, smem, STAGES: gl.constexpr, X_STAGES: gl.constexpr):
    """X' and R of every chunk."""
    qs, ks, zs, bs, es, xs, full, ready, x_free = smem
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, A))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, A))[None, :]
    s = 0
    phase = 0
    x = 0
    x_phase = 0
    for _ in range(n):
        mbarrier.wait(full.index(s), phase)
        q = qs.index(s)
        k = ks.index(s)
        qk = gl.zeros([64, 64], gl.float32, N)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
        b = bs.index(s).load(gl.SliceLayout(0, A))
        link = zs.index(s).load(A).to(gl.float32) * b[None, :]
        link = to_bf16(gl.where(i == j, 1.0, link))
        keys = gl.zeros([64, 128], gl.float32, L)
        keys = warpgroup_mma(link, k, keys, use_acc=False, is_async=True)
        qk = warpgroup_mma_wait(1, [qk])
        inside = gl.convert_layout(to_bf16(-qk), A)
        inside = gl.where(i >= j, inside, gl.zeros_like(inside))
        keys = warpgroup_mma_wait(0, [keys, link])[0]
        keys = keys * bs.index(s).load(gl.SliceLayout(1, L))[:, None]
        mbarrier.wait(x_free.index(x), x_phase ^ 1)
        xs.index(x).store(to_bf16(keys))
        fence_async_shared()
        barrier()
        r = q.load(L).to(gl.float32)
        r = warpgroup_mma(inside, xs.index(x), r, is_async=True)
        r = warpgroup_mma_wait(0, [r, inside])[0]
        r = r * (es.index(s).load(gl.SliceLayout(1, L)) * scale)[:, None]
        barrier()
        q.store(to_bf16(r))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(x), count=1)
        s, phase = next_stage(s, phase, STAGES)
        x, x_phase = next_stage(x, x_phase, X_STAGES)


@gluon.jit
def _walk(
    task,
    n,
    smem,
    COLUMN: gl.constexpr,
    FINAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    final, end, entered, result, row = task
    qs, ks, ds, ls, xs, full, empty, ready, x_free = smem
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LU: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AU: gl.constexpr = gl.DotOperandLayout(0, LU, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    S = gl.zeros([64, 128], gl.float32, LS)
    if FINAL:
        if (end >= 0) & entered:
            S = gl.load(state_pointers(final, end, COLUMN, V_FIRST, LS))
    s = 0
    phase = 0
    x = 0
    x_phase = 0
    for _ in range(n):
        mbarrier.wait(full.index(s), phase)
        a = gl.convert_layout(to_bf16(S), AU)
        u = gl.zeros([64, 64], gl.float32, LU)
        u = warpgroup_mma(a, ks.index(s).permute((1, 0)), u, use_acc=False, is_async=True)
        gamma = gl.sum(ls.index(s).slice(63, 1).load(ONE), 0)
        mbarrier.wait(ready.index(x), x_phase)
        u = warpgroup_mma_wait(0, [u, a])[0]
        S = S * gamma
        S = warpgroup_mma(ds.index(s).permute((1, 0)), qs.index(s), S, is_async=True)
        e = gl.convert_layout(to_bf16(u * -gamma), AS)
        S = warpgroup_mma(e, xs.index(x), S, is_async=True)
        S = warpgroup_mma_wait(0, [S, e])[0]
        barrier()
        mbarrier.arrive(empty.index(s), count=1)
        mbarrier.arrive(x_free.index(x), count=1)
        s, phase = next_stage(s, phase, STAGES)
        x, x_phase = next_stage(x, x_phase, X_STAGES)
    gl.store(state_pointers(result, row, COLUMN, False, LS), S)


@gluon.jit(do_not_specialize=["HV", "GROUP"])
def adjoint_summarize_kernel(
    qd,
    kd,
    dod,
    zd,
    G,
    beta,
    bound,
    border,
    final,
    tasks,
    chunks,
    HV,
    GROUP,
    scale,
    FINAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    follow()
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    d0s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    d1s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    zs = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], tile)
    xs = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, 64, 128], tile)
    bs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    es = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    ls = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
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
    fence_async_shared()
    task = tasks + gl.program_id(0) // HV * 8
    h = gl.program_id(0) % HV
    first = gl.load(task)
    n = gl.load(task + 1)
    end = gl.load(task + 2)
    row = gl.load(task + 4) * HV + h
    needed = _last_needed(bound + first.to(gl.int64) * HV + h, n, HV)
    # The sums went through the shared memory that takes the groups' arguments next.
    barrier()
    entered = needed == n
    n = gl.minimum(needed + 1, n)
    if end >= 0:
        end = end * HV + h
    walk = (final, end, entered, border, row)
    group0 = (qs, ks, d0s, ls, xs, full, empty, ready, x_free)
    group1 = (qs, ks, d1s, ls, xs, full, empty, ready, x_free)
    ring = (qs, ks, d0s, d1s, zs, bs, es, ls, full, empty)
    inside = (qs, ks, zs, bs, es, xs, full, ready, x_free)
    chunk = (chunks, first, h, HV, GROUP)
    gl.warp_specialize(
        [
            (_walk, (walk, n, group0, 0, FINAL, V_FIRST, STAGES, X_STAGES)),
            (_walk, (walk, n, group1, 64, FINAL, V_FIRST, STAGES, X_STAGES)),
            (_transfer, (n, scale, inside, STAGES, X_STAGES)),
            (_load, ((qd, kd, dod, zd), (G, beta), chunk, n, ring, STAGES)),
        ],
        [4, 4, 1],
        [160, 160, 32],
    )


_STAGES, _X_STAGES = 3, 2
"""Chunks that are loaded ahead, and X' that are made ahead."""


def _program(
    tables: DeviceTables, HV: int, H: int, scale: float, FINAL: bool, V_FIRST: bool
) -> Program:
    return Program(
        adjoint_summarize_kernel,
        tables.adjoint_summarize.count * HV,
        tables.device,
        tables.adjoint_summarize.rows,
        tables.chunks,
        HV,
        HV // H,
        scale,
        FINAL=FINAL,
        V_FIRST=V_FIRST,
        STAGES=_STAGES,
        X_STAGES=_X_STAGES,
    )


def adjoint_summarize(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    do: Tensor,
    G: Tensor,
    Z: Tensor,
    bound: Tensor,
    d_final_state: Tensor | None,
    scale: float,
    tables: Tables,
    *,
    dS_border: Tensor,
) -> None:
    HV, H = do.shape[1], k.shape[1]
    q, k, do = in_place(q), in_place(k), in_place(do)  # held until the launch
    final, v_first = laid_out(d_final_state)
    program = resolved(tables_of(tables), _program, HV, H, scale, final is not None, v_first)
    program(
        ragged(q, 128),
        ragged(k, 128),
        ragged(do, 64),
        flat(Z, 64, 64),
        G,
        beta,
        bound,
        dS_border,
        dS_border if final is None else final,
    )


VARIANTS = tuple(
    Variant(
        name,
        adjoint_summarize_kernel,
        48,
        {"FINAL": states, "V_FIRST": False, "STAGES": _STAGES, "X_STAGES": _X_STAGES},
    )
    for name, states in (("adjoint_summarize", True), ("adjoint_summarize, no states", False))
)
