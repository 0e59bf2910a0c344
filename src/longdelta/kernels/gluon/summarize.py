"""summarize: what a segment does to the state that enters it, S_out = M S_in + S_ext.

Chunk by chunk, with X = D (I + Z^T D) K:
    S <- gamma S - X^T (gamma K S - r V)        M <- gamma (M - X^T K M)
M is the same walk without V, from the identity. What the gates have made negligible at the
segment's end is left out: with b_c the bound of chunk c's transition, the state before chunk c is
forgotten where b_c + b_{c+1} + .. <= -20. A walk starts, from zero, with the chunk before the first
state that is not; where the state that enters is forgotten, M is 0 and nothing is walked. M_bound
is the sum of every b_c.

One program walks S or M of one (segment, value head), held transposed in registers like scan's
state, 64 rows in each of two warp groups; a third group makes X, a single warp loads. It is found
where to start before the groups part. Two waits a chunk: [K S], [X^T error]. Barriers: full (a
stage has come), ready and x_free (X made and read), empty (both groups are done with the stage).
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
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import LOG2E, add, flat, in_place, ragged, to_bf16
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import Tables
from longdelta.plan import chunks as plan
from longdelta.runtime.launch import Program, resolved

FORGOTTEN = gl.constexpr(plan.FORGOTTEN)


@gluon.jit
def _first_needed(bound, n, HV):
    """The first of a segment's n + 1 states, one before each chunk and the last, that counts at
    its end (one of NaN does), and the sum of all bounds."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    needed = n
    later = 0.0
    for block in range((n - 1) // 128, -1, -1):
        c = block * 128 + lane
        x = gl.load(bound + c.to(gl.int64) * HV, mask=c < n, other=0.0)
        decay = gl.associative_scan(x, 0, add, reverse=True) + later
        needed = gl.minimum(needed, gl.min(gl.where(decay <= FORGOTTEN, n, c), 0))
        later += gl.sum(x, 0)
    return needed, later


@gluon.jit
def _load(loads, vectors, table, n, smem, STAGES: gl.constexpr):
    kd, vd, zd = loads
    Gp, bp = vectors
    chunks, first, h, is_map, HV, GROUP = table
    ks, v0s, v1s, zs, gs, bs, rs, full, empty = smem
    RAG: gl.constexpr = kd.layout
    lane = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    hk = h // GROUP
    row = gl.load(chunks + 2 * first)
    size = gl.load(chunks + 2 * first + 1)
    for it in range(n):
        c = first + it
        slot = c * HV + h
        s = it % STAGES
        bar = full.index(s)
        y = row + size
        x = 64 - size
        k_tile = reinterpret(ks.index(s), gl.bfloat16, [1, 64, 1, 128], RAG)
        mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
        if is_map:
            mbarrier.expect(bar, 16384 + 8192)
        else:
            mbarrier.expect(bar, 2 * 16384 + 8192)
        async_load(kd, [y, x, hk, 0], bar, k_tile)
        async_load(zd, [slot * 64, 0], bar, zs.index(s))
        if not is_map:
            v0 = reinterpret(v0s.index(s), gl.bfloat16, [1, 64, 1, 64], RAG)
            v1 = reinterpret(v1s.index(s), gl.bfloat16, [1, 64, 1, 64], RAG)
            async_load(vd, [y, x, h, 0], bar, v0)
            async_load(vd, [y, x, h, 64], bar, v1)
        g = Gp + slot.to(gl.int64) * 64
        g2 = gl.load(g + lane)
        last = gl.load(g + 63)
        b = gl.load(bp + (row + lane).to(gl.int64) * HV + h, mask=lane < size, other=0.0)
        following = chunks + 2 * gl.minimum(c + 1, first + n - 1)
        row = gl.load(following)
        size = gl.load(following + 1)
        gs.index(s).store(g2 * LOG2E)
        bs.index(s).store(b)
        rs.index(s).store(gl.exp2(last * LOG2E - g2 * LOG2E))
        barrier()
        mbarrier.arrive(bar, count=1)


@gluon.jit
def _transfer(n, smem, STAGES: gl.constexpr, X_STAGES: gl.constexpr):
    """X of every chunk."""
    ks, zs, bs, xs, full, ready, x_free = smem
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, A))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, A))[None, :]
    for it in range(n):
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
        barrier()
        mbarrier.arrive(ready.index(x), count=1)


@gluon.jit
def _walk(
    task,
    n,
    smem,
    COLUMN: gl.constexpr,
    INITIAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    initial, start, entered, is_map, result, row = task
    ks, vs, gs, rs, xs, full, empty, ready, x_free = smem
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LU: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AU: gl.constexpr = gl.DotOperandLayout(0, LU, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    CU: gl.constexpr = gl.SliceLayout(0, LU)
    vi = gl.arange(0, 64, layout=gl.SliceLayout(1, LS))[:, None] + COLUMN
    ki = gl.arange(0, 128, layout=gl.SliceLayout(0, LS))[None, :]
    S = gl.where((vi == ki) & is_map & entered, 1.0, gl.zeros([64, 128], gl.float32, LS))
    if INITIAL:
        if (start >= 0) & entered:
            S = gl.load(state_pointers(initial, start, COLUMN, V_FIRST, LS))
    for it in range(n):
        s = it % STAGES
        x = it % X_STAGES
        mbarrier.wait(full.index(s), (it // STAGES) & 1)
        a = gl.convert_layout(to_bf16(S), AU)
        u = gl.zeros([64, 64], gl.float32, LU)
        u = warpgroup_mma(a, ks.index(s).permute((1, 0)), u, use_acc=False, is_async=True)
        last = gl.sum(gs.index(s).slice(63, 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        gamma = gl.exp2(last)
        error = gl.zeros([64, 64], gl.float32, LU)
        if not is_map:
            v = vs.index(s).permute((1, 0)).load(LU).to(gl.float32)
            error = v * rs.index(s).load(CU)[None, :]
        u = warpgroup_mma_wait(0, [u, a])[0]
        error = error - gamma * u
        e = gl.convert_layout(to_bf16(error), AS)
        S = S * gamma
        mbarrier.wait(ready.index(x), (it // X_STAGES) & 1)
        S = warpgroup_mma(e, xs.index(x), S, is_async=True)
        S = warpgroup_mma_wait(0, [S, e])[0]
        barrier()
        mbarrier.arrive(empty.index(s), count=1)
        mbarrier.arrive(x_free.index(x), count=1)
    gl.store(state_pointers(result, row, COLUMN, False, LS), S)


@gluon.jit(do_not_specialize=["HV", "GROUP"])
def summarize_kernel(
    kd,
    vd,
    zd,
    G,
    beta,
    bound,
    border,
    transition,
    transition_bound,
    initial,
    tasks,
    chunks,
    HV,
    GROUP,
    INITIAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):
    follow()
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
    fence_async_shared()
    task = tasks + gl.program_id(0) // HV * 8
    h = gl.program_id(0) % HV
    first = gl.load(task)
    n = gl.load(task + 1)
    start = gl.load(task + 2)
    is_map = gl.load(task + 3) != 0
    row = gl.load(task + 4) * HV + h
    needed, growth = _first_needed(bound + first.to(gl.int64) * HV + h, n, HV)
    # The sums went through the shared memory that takes the groups' arguments next.
    barrier()
    entered = needed == 0
    skipped = gl.maximum(needed - 1, 0)
    first += skipped
    n -= skipped
    if is_map:
        gl.store(transition_bound + row, growth)
        if needed > 0:
            n = 0
    if start >= 0:
        start = start * HV + h
    result = border
    if is_map:
        result = transition
    walk = (initial, start, entered, is_map, result, row)
    group0 = (ks, v0s, gs, rs, xs, full, empty, ready, x_free)
    group1 = (ks, v1s, gs, rs, xs, full, empty, ready, x_free)
    ring = (ks, v0s, v1s, zs, gs, bs, rs, full, empty)
    inside = (ks, zs, bs, xs, full, ready, x_free)
    chunk = (chunks, first, h, is_map, HV, GROUP)
    gl.warp_specialize(
        [
            (_walk, (walk, n, group0, 0, INITIAL, V_FIRST, STAGES, X_STAGES)),
            (_walk, (walk, n, group1, 64, INITIAL, V_FIRST, STAGES, X_STAGES)),
            (_transfer, (n, inside, STAGES, X_STAGES)),
            (_load, ((kd, vd, zd), (G, beta), chunk, n, ring, STAGES)),
        ],
        [4, 4, 1],
        [184, 112, 32],
    )


_STAGES, _X_STAGES = 3, 2
"""Chunks that are loaded ahead, and X that are made ahead."""


def _program(tables: DeviceTables, HV: int, H: int, INITIAL: bool, V_FIRST: bool) -> Program:
    return Program(
        summarize_kernel,
        tables.summarize.count * HV,
        tables.device,
        tables.summarize.rows,
        tables.chunks,
        HV,
        HV // H,
        INITIAL=INITIAL,
        V_FIRST=V_FIRST,
        STAGES=_STAGES,
        X_STAGES=_X_STAGES,
    )


def summarize(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    G: Tensor,
    Z: Tensor,
    bound: Tensor,
    initial_state: Tensor | None,
    tables: Tables,
    *,
    S_border: Tensor,
    M: Tensor,
    M_bound: Tensor,
) -> None:
    HV, H = v.shape[1], k.shape[1]
    k, v = in_place(k), in_place(v)  # held until the launch: a tile does not hold its memory
    initial, v_first = laid_out(initial_state)
    program = resolved(tables_of(tables), _program, HV, H, initial is not None, v_first)
    program(
        ragged(k, 128),
        ragged(v, 64),
        flat(Z, 64, 64),
        G,
        beta,
        bound,
        S_border,
        M if M.numel() else S_border,
        M_bound if M_bound.numel() else bound,
        S_border if initial is None else initial,
    )


VARIANTS = tuple(
    Variant(
        name,
        summarize_kernel,
        28,
        {"INITIAL": states, "V_FIRST": False, "STAGES": _STAGES, "X_STAGES": _X_STAGES},
    )
    for name, states in (("summarize", True), ("summarize, no states", False))
)
