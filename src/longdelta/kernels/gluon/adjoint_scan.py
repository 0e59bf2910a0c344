"""adjoint_scan: the cotangent of the state, one chunk after another from each segment's end.

    dU = (s Gam Q K^T)^T dO + r (K dS)        dR = dU + (Gam b_i Z)^T dU
    dS <- gamma dS + Q^T (s E dO) - K^T (b E dR)
One program walks one (segment, value head) after another, from the last chunk to the first, or
halves of them (halves.py). Each of its one or two groups of the cotangent holds 64 values of it,
transposed, [values, keys] in fp32, in registers, as scan holds the state. Another makes Gam b Z and
P = s Gam Q K^T ahead of them, as [i, j], which is how transposed products read them, and the
vectors s E, -b E and r; a single warp loads.

Per chunk and group: K dS and P^T dO, and under them the tape of dS; then (Gam b Z)^T dU, under it
gamma dS and s E dO; then Q^T s E dO, under it b E dR; then K^T b E dR, under it the tape of dR.
Three waits: for dU, for dR (the product with Q goes on), for dS, which is converted at once. K dS
has an accumulator of its own, since r is applied to it in fp32. dS may start from a border, from
d_final_state or from zero; borders are read only.

Rounded to bf16, each once: dS (the operand is the tape), P, Gam b Z, dU, s E dO, b E dR, and dR for
its tape. b is a factor of Gam b Z, not of dU, as in scan: one rounding either way, 45 instructions
fewer. s E is a factor of dO, not of Q: one rounding either way and about 180 instructions either
way, which two groups share here; in the other Q would be read and written once more, 32 KB of the
400 that a chunk moves through shared memory.

Grid: scan's tasks. Barriers, by stage: full (tiles, G and b are there), ready (Gam b Z, P and the
vectors are made), empty (the groups of the cotangent are done). Shared memory: a ring of two
stages of 64 KB (Q, K, dO, Z, P); dS and dR for the tapes, 48 KB. With one group three stages of
56 KB, and 24 KB.
Exact: where no gate is positive no exponent is, and Gam's mask selects before exp2. Rows that a
chunk lacks have q, k, do and b of zero, add nothing and leave zeros in dR. What is taken and
given of first and last states does not change the tapes' instructions.
"""

from __future__ import annotations

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

from longdelta.kernels.gluon import halves
from longdelta.kernels.gluon.dialect import async_load, barrier, follow, reinterpret
from longdelta.kernels.gluon.halves import walk_of
from longdelta.kernels.gluon.states import laid_out, state_pointers
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import (
    LOG2E,
    ask_for_vectors,
    decays,
    flat,
    from_bf16,
    in_place,
    next_stage,
    put,
    quarters,
    ragged,
    to_bf16,
    whole,
)
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import Tables
from longdelta.runtime.launch import Program, programs, resolved


@gluon.jit
def _load(given, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    loads, vectors, chunks, GROUP, walks, smem = given
    qd, kd, od, zd = loads
    G, beta = vectors
    tasks, n_tasks, HV = walks
    qs, ks, d0s, d1s, zs, gs, bs, full, empty = smem
    RAG: gl.constexpr = kd.layout
    lane = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [1], [0]))
    s = 0
    phase = 0
    t = gl.program_id(0)
    more = True
    while more:
        seg, h, column = walk_of(t, HV, GROUPS)
        first = gl.load(tasks + seg * 8)
        n = gl.load(tasks + seg * 8 + 1)
        hk = h // GROUP
        last = first + n - 1
        row, size, g, _, b = ask_for_vectors(chunks, G, beta, lane, last, HV, h)
        for c in range(last, first - 1, -1):
            mbarrier.wait(empty.index(s), phase ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, 32768 + 8192 * (1 + GROUPS))
            y = row + size
            x = 64 - size
            k_tile = reinterpret(ks.index(s), gl.bfloat16, [1, 64, 1, 128], RAG)
            q_tile = reinterpret(qs.index(s), gl.bfloat16, [1, 64, 1, 128], RAG)
            async_load(kd, [y, x, hk, 0], bar, k_tile)
            async_load(qd, [y, x, hk, 0], bar, q_tile)
            async_load(zd, [(c * HV + h) * 64, 0], bar, zs.index(s))
            d0 = reinterpret(d0s.index(s), gl.bfloat16, [1, 64, 1, 64], RAG)
            async_load(od, [y, x, h, column], bar, d0)
            if GROUPS == 2:
                d1 = reinterpret(d1s.index(s), gl.bfloat16, [1, 64, 1, 64], RAG)
                async_load(od, [y, x, h, 64], bar, d1)
            then = gl.maximum(c - 1, first)
            row, size, next_g, _, next_b = ask_for_vectors(chunks, G, beta, lane, then, HV, h)
            gs.index(s).store(g * LOG2E)
            bs.index(s).store(b)
            barrier()
            mbarrier.arrive(bar, count=1)
            g, b = next_g, next_b
            s, phase = next_stage(s, phase, STAGES)
        t += gl.num_programs(0)
        more = t < n_tasks


@gluon.jit
def _within(given, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Gam b Z over Z in place, P, and the rows' factors."""
    scale, walks, smem = given
    tasks, n_tasks, HV = walks
    qs, ks, zs, ps, gs, bs, es, rs, ws, full, ready = smem
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, Q))
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, Q))
    gz = reinterpret(zs, gl.bfloat16, [STAGES, 64, 64], zs.layout)
    s = 0
    phase = 0
    t = gl.program_id(0)
    more = True
    while more:
        n = gl.load(tasks + walk_of(t, HV, GROUPS)[0] * 8 + 1)
        for _ in range(n):
            mbarrier.wait(full.index(s), phase)
            a = gl.zeros([64, 64], gl.float32, L)
            a = warpgroup_mma(
                qs.index(s), ks.index(s).permute((1, 0)), a, use_acc=False, is_async=True
            )
            gi = gs.index(s).load(gl.SliceLayout(1, Q))
            bi = bs.index(s).load(gl.SliceLayout(1, Q))
            e = gl.exp2(gi)
            es.index(s).store(e * scale)
            ws.index(s).store(bi * -e)
            rs.index(s).store(gl.exp2(gl.sum(gs.index(s).slice(63, 1).load(ONE), 0) - gi))
            gi = gi[:, None]
            bi = bi[:, None]
            z = quarters(zs.index(s).load(L), H, Q)
            zb = ()
            pb = ()
            for x in gl.static_range(4):
                gj = gs.index(s).slice(16 * x, 16).load(gl.SliceLayout(0, Q))[None, :]
                gam = decays(gi, gj, i, j, x)
                zb = zb + (to_bf16(z[x].to(gl.float32) * (gam * bi)),)
                if x == 0:
                    p = quarters(warpgroup_mma_wait(0, [a]), H, Q)
                pb = pb + (to_bf16(p[x] * (gam * scale)),)
            barrier()
            gz.index(s).store(whole(zb, H, L))
            ps.index(s).store(whole(pb, H, L))
            fence_async_shared()
            barrier()
            mbarrier.arrive(ready.index(s), count=1)
            s, phase = next_stage(s, phase, STAGES)
        t += gl.num_programs(0)
        more = t < n_tasks


@gluon.jit
def _walk(
    given,
    HALF: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    stores, states, walks, smem = given
    sd, ud = stores
    border, initial, final = states
    tasks, n_tasks, HV = walks
    qs, ks, ds, zs, ps, gs, es, rs, ws, snaps, tapes, full, empty, ready = smem
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LU: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AU: gl.constexpr = gl.DotOperandLayout(0, LU, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    CU: gl.constexpr = gl.SliceLayout(0, LU)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gz = reinterpret(zs, gl.bfloat16, [STAGES, 64, 64], zs.layout)
    snap = snaps.index(HALF)
    tape = tapes.index(HALF)
    s = 0
    phase = 0
    t = gl.program_id(0)
    more = True
    while more:
        seg, h, column = walk_of(t, HV, GROUPS)
        column += 64 * HALF
        first = gl.load(tasks + seg * 8)
        n = gl.load(tasks + seg * 8 + 1)
        start = gl.load(tasks + seg * 8 + 2)
        end = gl.load(tasks + seg * 8 + 3)
        leave = gl.load(tasks + seg * 8 + 5)
        S = gl.zeros([64, 128], gl.float32, LS)
        if leave >= 0:
            S = gl.load(state_pointers(border, leave * HV + h, column, False, LS))
        elif FINAL:
            if end >= 0:
                S = gl.load(state_pointers(final, end * HV + h, column, V_FIRST, LS))
        Sb = to_bf16(S)
        for c in range(first + n - 1, first - 1, -1):
            k = ks.index(s)
            mbarrier.wait(full.index(s), phase)
            a = gl.convert_layout(Sb, AU)
            u = gl.zeros([64, 64], gl.float32, LU)
            u = warpgroup_mma(a, k.permute((1, 0)), u, use_acc=False, is_async=True)
            mbarrier.wait(ready.index(s), phase)
            p = gl.zeros([64, 64], gl.float32, LU)
            o = ds.index(s).permute((1, 0))
            p = warpgroup_mma(o, ps.index(s), p, use_acc=False, is_async=True)
            put(sd, [(c * HV + h) * 128, column], snap, Sb, 1)
            r = rs.index(s).load(CU)
            done = warpgroup_mma_wait(0, [u, p, a])
            w = done[1] + done[0] * r[None, :]
            y = gl.convert_layout(to_bf16(w), AU)
            w = warpgroup_mma(y, gz.index(s), w, is_async=True)
            # Not earlier: a touch of dS makes ptxas wait for what is in flight.
            S = S * gl.exp2(gl.sum(gs.index(s).slice(63, 1).load(ONE), 0))
            e = es.index(s).load(CU)
            d = o.load(LU)
            d = gl.convert_layout(to_bf16(from_bf16(d) * e[None, :]), AS)
            S = warpgroup_mma(d, qs.index(s), S, is_async=True)
            e = ws.index(s).load(CU)
            w = warpgroup_mma_wait(1, [w, y])[0]
            x = gl.convert_layout(to_bf16(w * e[None, :]), AS)
            S = warpgroup_mma(x, k, S, is_async=True)
            put(ud, [(c * HV + h) * 64, column], tape, to_bf16(w), 1)
            S = warpgroup_mma_wait(0, [S, d, x])[0]
            Sb = to_bf16(S)
            barrier()
            mbarrier.arrive(empty.index(s), count=1)
            s, phase = next_stage(s, phase, STAGES)
        if INITIAL:
            if start >= 0:
                gl.store(state_pointers(initial, start * HV + h, column, V_FIRST, LS), S)
        t += gl.num_programs(0)
        more = t < n_tasks
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_tasks", "HV", "GROUP"])
def adjoint_scan_kernel(
    qd,
    kd,
    od,
    zd,
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
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    follow()
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    d0s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    d1s = d0s
    if GROUPS == 2:
        d1s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    zs = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], tile)
    ps = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    snaps = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 128, 64], tile)
    tapes = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 64], tile)
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    bs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    es = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    rs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    ws = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=GROUPS)
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    walks = (tasks, n_tasks, HV)
    states, stores = (border, initial, final), (sd, ud)
    group0 = (qs, ks, d0s, zs, ps, gs, es, rs, ws, snaps, tapes, full, empty, ready)
    group1 = (qs, ks, d1s, zs, ps, gs, es, rs, ws, snaps, tapes, full, empty, ready)
    ring = (qs, ks, d0s, d1s, zs, gs, bs, full, empty)
    walk0 = (stores, states, walks, group0)
    walk1 = (stores, states, walks, group1)
    within = (scale, walks, (qs, ks, zs, ps, gs, bs, es, rs, ws, full, ready))
    load = ((qd, kd, od, zd), (G, beta), chunks, GROUP, walks, ring)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_walk, (walk0, 0, INITIAL, FINAL, V_FIRST, STAGES, GROUPS)),
                (_walk, (walk1, 1, INITIAL, FINAL, V_FIRST, STAGES, GROUPS)),
                (_within, (within, STAGES, GROUPS)),
                (_load, (load, STAGES, GROUPS)),
            ],
            [4, 4, 1],
            [200, 88, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (walk0, 0, INITIAL, FINAL, V_FIRST, STAGES, GROUPS)),
                (_within, (within, STAGES, GROUPS)),
                (_load, (load, STAGES, GROUPS)),
            ],
            [4, 1],
            [232, 24],
        )


_STAGES = {2: 2, 1: 3}
"""Chunks in shared memory, by state groups."""


def _program(
    tables: DeviceTables,
    HV: int,
    H: int,
    scale: float,
    INITIAL: bool,
    FINAL: bool,
    V_FIRST: bool,
) -> Program:
    groups = halves.groups_of(tables, HV)
    tasks = tables.scan.count * HV * 2 // groups
    return Program(
        adjoint_scan_kernel,
        programs(tasks, tables.scan.longest, tables.device),
        tables.device,
        tables.scan.rows,
        tables.chunks,
        tasks,
        HV,
        HV // H,
        scale,
        INITIAL=INITIAL,
        FINAL=FINAL,
        V_FIRST=V_FIRST,
        STAGES=_STAGES[groups],
        GROUPS=groups,
    )


def adjoint_scan(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    do: Tensor,
    G: Tensor,
    Z: Tensor,
    dS_border: Tensor,
    d_final_state: Tensor | None,
    scale: float,
    tables: Tables,
    *,
    dS: Tensor,
    dR: Tensor,
    d_initial_state: Tensor | None,
) -> None:
    initial, v_first = laid_out(d_initial_state)
    final, final_v_first = laid_out(d_final_state)
    if initial is None:
        v_first = final_v_first
    elif final is not None and final_v_first != v_first:
        final = final.transpose(-1, -2).contiguous().transpose(-1, -2)
        if not v_first:
            final = final.contiguous()
    q, k, do = in_place(q), in_place(k), in_place(do)  # held until the launch
    program = resolved(
        tables_of(tables),
        _program,
        do.shape[1],
        k.shape[1],
        scale,
        initial is not None,
        final is not None,
        v_first,
    )
    program(
        ragged(q, 128),
        ragged(k, 128),
        ragged(do, 64),
        flat(Z, 64, 64),
        flat(dS, 128, 64),
        flat(dR, 64, 64),
        G,
        beta,
        dS_border,
        dS_border if initial is None else initial,
        dS_border if final is None else final,
    )


def _variants(groups: int) -> tuple[Variant, ...]:
    def variant(name: str, STATES: bool, V_FIRST: bool = False) -> Variant:
        constants = {"INITIAL": STATES, "FINAL": STATES, "V_FIRST": V_FIRST}
        constants |= {"STAGES": _STAGES[groups], "GROUPS": groups}
        name += "" if groups == 2 else ", halves"
        return Variant(name, adjoint_scan_kernel, 8 + 24 * groups, constants)

    return (
        variant("adjoint_scan", STATES=True),
        variant("adjoint_scan, value first", STATES=True, V_FIRST=True),
        variant("adjoint_scan, no states", STATES=False),
    )


VARIANTS = (*_variants(groups=2), *_variants(groups=1))
