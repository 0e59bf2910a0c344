"""scan: state and output, one chunk after another, every segment from its own S_in.

    W = V - E K S        Uh = W + (Gam Z b_j) W
    O = s E Q S + (s Gam Q K^T b_j) Uh        S <- gamma S + K^T (r b Uh)
One program walks one (segment, value head) after another, or halves of them (halves.py). Each of
its one or two state groups holds 64 values of the state, transposed, [values, keys] in fp32, in
registers: it is itself the operand of the products with K and Q and never passes through shared
memory. A group of warps more makes Gam Z b and P = s Gam Q K^T b ahead of them, a single one
loads.

Per chunk and group: K S and Q S, then (Gam Z b) W, then K^T r b Uh, and under the next state's
conversion P Uh. O is stored a chunk later, under K S, since the next chunk waits for nothing of it.
The loader asks for a chunk's vectors while it loads the chunk before (tiles.py, `ask_for_vectors`).
A state group of two has 200 registers and needs them all in the loop over chunks, so nothing is
kept through it that can be had again: addresses of states (states.py, Note [Addresses]), offsets
for stages (`next_stage`), those of a path without any walk (a program has one at least). For that
the group of Gam Z b makes do with 88 and works on a quarter of the columns at a time.

Barriers, by stage: full (tiles and vectors are there), ready (Gam Z b and P are made), empty (the
state groups are done). Shared memory: a ring of three stages of 64 KB (Q, K, V, Z, P), two where
both o and tapes are wanted; O, 16 KB; S and Uh for the tapes, 48 KB. With one state group three
stages of 56 KB; 8 and 24 KB. S and Uh come from the same instructions whether or not o and tapes
are wanted.
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
def _load(given, OUT: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    loads, vectors, chunks, GROUP, walks, smem = given
    qd, kd, vd, zd = loads
    G, beta = vectors
    tasks, n_tasks, HV = walks
    qs, ks, v0s, v1s, zs, gs, bs, es, rs, full, empty = smem
    RAG: gl.constexpr = kd.layout
    BYTES: gl.constexpr = (32768 if OUT else 16384) + 8192 * (1 + GROUPS)
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
        row, size, g, last, b = ask_for_vectors(chunks, G, beta, lane, first, HV, h)
        for c in range(first, first + n):
            mbarrier.wait(empty.index(s), phase ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, BYTES)
            y = row + size
            x = 64 - size
            async_load(zd, [(c * HV + h) * 64, 0], bar, zs.index(s))
            k_tile = reinterpret(ks.index(s), gl.bfloat16, [1, 64, 1, 128], RAG)
            async_load(kd, [y, x, hk, 0], bar, k_tile)
            if OUT:
                q_tile = reinterpret(qs.index(s), gl.bfloat16, [1, 64, 1, 128], RAG)
                async_load(qd, [y, x, hk, 0], bar, q_tile)
            v0 = reinterpret(v0s.index(s), gl.bfloat16, [1, 64, 1, 64], RAG)
            async_load(vd, [y, x, h, column], bar, v0)
            if GROUPS == 2:
                v1 = reinterpret(v1s.index(s), gl.bfloat16, [1, 64, 1, 64], RAG)
                async_load(vd, [y, x, h, 64], bar, v1)
            then = gl.minimum(c + 1, first + n - 1)
            row, size, next_g, next_last, next_b = ask_for_vectors(
                chunks, G, beta, lane, then, HV, h
            )
            g2 = g * LOG2E
            gs.index(s).store(g2)
            bs.index(s).store(b)
            es.index(s).store(-gl.exp2(g2))
            rs.index(s).store(b * gl.exp2(last * LOG2E - g2))
            barrier()
            mbarrier.arrive(bar, count=1)
            g, last, b = next_g, next_last, next_b
            s, phase = next_stage(s, phase, STAGES)
        t += gl.num_programs(0)
        more = t < n_tasks


@gluon.jit
def _within(given, OUT: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Gam Z b over Z in place, and P."""
    scale, walks, smem = given
    tasks, n_tasks, HV = walks
    qs, ks, zs, ps, gs, bs, full, ready = smem
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
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
            if OUT:
                a = gl.zeros([64, 64], gl.float32, L)
                a = warpgroup_mma(
                    qs.index(s), ks.index(s).permute((1, 0)), a, use_acc=False, is_async=True
                )
            gi = gs.index(s).load(gl.SliceLayout(1, Q))[:, None]
            z = quarters(zs.index(s).load(L), H, Q)
            zb = ()
            pb = ()
            for x in gl.static_range(4):
                gj = gs.index(s).slice(16 * x, 16).load(gl.SliceLayout(0, Q))[None, :]
                gam = decays(gi, gj, i, j, x)
                gam = gam * bs.index(s).slice(16 * x, 16).load(gl.SliceLayout(0, Q))[None, :]
                zb = zb + (to_bf16(z[x].to(gl.float32) * gam),)
                if OUT:
                    if x == 0:
                        p = quarters(warpgroup_mma_wait(0, [a]), H, Q)
                    pb = pb + (to_bf16(p[x] * (gam * scale)),)
            barrier()
            gz.index(s).store(whole(zb, H, L))
            if OUT:
                ps.index(s).store(whole(pb, H, L))
            fence_async_shared()
            barrier()
            mbarrier.arrive(ready.index(s), count=1)
            s, phase = next_stage(s, phase, STAGES)
        t += gl.num_programs(0)
        more = t < n_tasks


@gluon.jit
def _put(od, at, out, o, PENDING: gl.constexpr):
    """Rows of O out."""
    row, size, h, column = at
    put(od, [row + size, 64 - size, h, column], out, o, PENDING)


@gluon.jit
def _walk(
    given,
    HALF: gl.constexpr,
    INITIAL: gl.constexpr,
    FINAL: gl.constexpr,
    V_FIRST: gl.constexpr,
    OUT: gl.constexpr,
    TAPES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
):
    stores, states, chunks, scale, walks, smem = given
    od, sd, ud = stores
    border, initial, final = states
    tasks, n_tasks, HV = walks
    qs, ks, vs, zs, ps, es, rs, outs, snaps, tapes, full, empty, ready = smem
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LU: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AU: gl.constexpr = gl.DotOperandLayout(0, LU, 2)
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    CU: gl.constexpr = gl.SliceLayout(0, LU)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PENDING: gl.constexpr = (1 if OUT else 0) + (2 if TAPES else 0) - 1
    gz = reinterpret(zs, gl.bfloat16, [STAGES, 64, 64], zs.layout)
    out = outs.index(HALF)
    snap = snaps.index(HALF)
    tape = tapes.index(HALF)
    s = 0
    phase = 0
    o3 = gl.zeros([64, 64], gl.bfloat16, LU)
    at = (0, 0, 0, 64 * HALF)  # no rows
    t = gl.program_id(0)
    more = True
    while more:
        seg, h, column = walk_of(t, HV, GROUPS)
        column += 64 * HALF
        first = gl.load(tasks + seg * 8)
        n = gl.load(tasks + seg * 8 + 1)
        start = gl.load(tasks + seg * 8 + 2)
        end = gl.load(tasks + seg * 8 + 3)
        enter = gl.load(tasks + seg * 8 + 4)
        S = gl.zeros([64, 128], gl.float32, LS)
        if enter >= 0:
            S = gl.load(state_pointers(border, enter * HV + h, column, False, LS))
        elif INITIAL:
            S = gl.load(state_pointers(initial, start * HV + h, column, V_FIRST, LS))
        Sb = to_bf16(S)
        for c in range(first, first + n):
            k = ks.index(s)
            mbarrier.wait(full.index(s), phase)
            a = gl.convert_layout(Sb, AU)
            u = gl.zeros([64, 64], gl.float32, LU)
            u = warpgroup_mma(a, k.permute((1, 0)), u, use_acc=False, is_async=True)
            if OUT:
                _put(od, at, out, o3, PENDING)
                o = gl.zeros([64, 64], gl.float32, LU)
                o = warpgroup_mma(a, qs.index(s).permute((1, 0)), o, use_acc=False, is_async=True)
            if TAPES:
                put(sd, [(c * HV + h) * 128, column], snap, Sb, PENDING)
            v = vs.index(s).permute((1, 0)).load(LU)
            mbarrier.wait(ready.index(s), phase)
            if OUT:
                done = warpgroup_mma_wait(0, [u, o, a])
                u = done[0]
                o = done[1]
            else:
                u = warpgroup_mma_wait(0, [u, a])[0]
            e = es.index(s).load(CU)
            w = from_bf16(v) + u * e[None, :]
            wb = gl.convert_layout(to_bf16(w), AU)
            w = warpgroup_mma(wb, gz.index(s).permute((1, 0)), w, is_async=True)
            # Read only here, gamma cannot hold up the product above.
            S = S * -gl.sum(es.index(s).slice(63, 1).load(ONE), 0)
            r = rs.index(s).load(CU)
            if OUT:
                o2 = o * (e * -scale)[None, :]
            w = warpgroup_mma_wait(0, [w, wb])[0]
            Uh = to_bf16(w)
            x = gl.convert_layout(to_bf16(w * r[None, :]), AS)
            S = warpgroup_mma(x, k, S, is_async=True)
            if OUT:
                y = gl.convert_layout(Uh, AU)
                o2 = warpgroup_mma(y, ps.index(s).permute((1, 0)), o2, is_async=True)
            if TAPES:
                put(ud, [(c * HV + h) * 64, column], tape, Uh, PENDING)
            if OUT:
                at = (gl.load(chunks + 2 * c), gl.load(chunks + 2 * c + 1), h, column)
                S = warpgroup_mma_wait(1, [S, x])[0]
                Sb = to_bf16(S)
                o3 = to_bf16(warpgroup_mma_wait(0, [o2, y])[0])
            else:
                S = warpgroup_mma_wait(0, [S, x])[0]
                Sb = to_bf16(S)
            barrier()
            mbarrier.arrive(empty.index(s), count=1)
            s, phase = next_stage(s, phase, STAGES)
        if FINAL:
            if end >= 0:
                gl.store(state_pointers(final, end * HV + h, column, V_FIRST, LS), S)
        t += gl.num_programs(0)
        more = t < n_tasks
    if OUT:
        _put(od, at, out, o3, PENDING)
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
    GROUPS: gl.constexpr,
):
    follow()
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    v0s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    v1s = v0s
    if GROUPS == 2:
        v1s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    zs = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], tile)
    qs = ks
    ps = v0s
    outs = v0s
    snaps = reinterpret(ks, gl.bfloat16, [STAGES, 128, 64], tile)
    tapes = v0s
    if OUT:
        qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
        ps = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
        outs = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 64], tile)
    if TAPES:
        snaps = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 128, 64], tile)
        tapes = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 64], tile)
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    bs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    es = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    rs = gl.allocate_shared_memory(gl.float32, [STAGES, 64], vector)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=GROUPS)
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    walks = (tasks, n_tasks, HV)
    states, stores = (border, initial, final), (od, sd, ud)
    group0 = (qs, ks, v0s, zs, ps, es, rs, outs, snaps, tapes, full, empty, ready)
    group1 = (qs, ks, v1s, zs, ps, es, rs, outs, snaps, tapes, full, empty, ready)
    ring = (qs, ks, v0s, v1s, zs, gs, bs, es, rs, full, empty)
    walk0 = (stores, states, chunks, scale, walks, group0)
    walk1 = (stores, states, chunks, scale, walks, group1)
    within = (scale, walks, (qs, ks, zs, ps, gs, bs, full, ready))
    load = ((qd, kd, vd, zd), (G, beta), chunks, GROUP, walks, ring)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_walk, (walk0, 0, INITIAL, FINAL, V_FIRST, OUT, TAPES, STAGES, GROUPS)),
                (_walk, (walk1, 1, INITIAL, FINAL, V_FIRST, OUT, TAPES, STAGES, GROUPS)),
                (_within, (within, OUT, STAGES, GROUPS)),
                (_load, (load, OUT, STAGES, GROUPS)),
            ],
            [4, 4, 1],
            [200, 88, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (walk0, 0, INITIAL, FINAL, V_FIRST, OUT, TAPES, STAGES, GROUPS)),
                (_within, (within, OUT, STAGES, GROUPS)),
                (_load, (load, OUT, STAGES, GROUPS)),
            ],
            [4, 1],
            [216, 40],
        )


def _stages(OUT: bool, TAPES: bool, groups: int) -> int:
    """Chunks in shared memory."""
    return 2 if OUT and TAPES and groups == 2 else 3


def _program(
    tables: DeviceTables,
    HV: int,
    H: int,
    scale: float,
    INITIAL: bool,
    FINAL: bool,
    V_FIRST: bool,
    OUT: bool,
    TAPES: bool,
) -> Program:
    groups = halves.groups_of(tables, HV)
    tasks = tables.scan.count * HV * 2 // groups
    return Program(
        scan_kernel,
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
        OUT=OUT,
        TAPES=TAPES,
        STAGES=_stages(OUT, TAPES, groups),
        GROUPS=groups,
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
    final, v_first = laid_out(final_state)
    initial, initial_v_first = laid_out(initial_state)
    if final is None:
        v_first = initial_v_first
    elif initial is not None and initial_v_first != v_first:
        initial = initial.transpose(-1, -2).contiguous().transpose(-1, -2)
        if not v_first:
            initial = initial.contiguous()
    q, k, v = in_place(q), in_place(k), in_place(v)
    vd = ragged(v, 64)
    program = resolved(
        tables_of(tables),
        _program,
        v.shape[1],
        k.shape[1],
        scale,
        initial is not None,
        final is not None,
        v_first,
        o is not None,
        S is not None,
    )
    program(
        ragged(q, 128),
        ragged(k, 128),
        vd,
        flat(Z, 64, 64),
        vd if o is None else ragged(o, 64),
        flat(k if S is None else S, 128, 64),
        flat(k if Uh is None else Uh, 64, 64),
        G,
        beta,
        S_border,
        S_border if initial is None else initial,
        S_border if final is None else final,
    )


def _variants(groups: int) -> tuple[Variant, ...]:
    within, a_group = 8, (28, 16)  # with and without o

    def variant(
        name: str, *, OUT: bool, TAPES: bool, STATES: bool, V_FIRST: bool = False
    ) -> Variant:
        flags = {"INITIAL": STATES, "FINAL": STATES and OUT, "V_FIRST": V_FIRST}
        flags |= {"OUT": OUT, "TAPES": TAPES}
        constants = flags | {"STAGES": _stages(OUT, TAPES, groups), "GROUPS": groups}
        products = groups * a_group[0] + within if OUT else groups * a_group[1]
        name += "" if groups == 2 else ", halves"
        return Variant(name, scan_kernel, products, constants)

    return (
        variant("scan", OUT=True, TAPES=False, STATES=True),
        variant("scan, value first", OUT=True, TAPES=False, STATES=True, V_FIRST=True),
        variant("scan, tapes alone", OUT=False, TAPES=True, STATES=True),
        variant("scan, both", OUT=True, TAPES=True, STATES=True),
        variant("scan, no states", OUT=True, TAPES=False, STATES=False),
        variant("scan, tapes alone, no states", OUT=False, TAPES=True, STATES=False),
        variant("scan, both, no states", OUT=True, TAPES=True, STATES=False),
    )


VARIANTS = (*_variants(groups=2), *_variants(groups=1))
