"""gradients: every token's gradients from the tapes, all chunks alike.

    A = s Gam (dO Uh^T) b_j        Y = -tril(Gam (b_i dR Uh^T) b_j, -1)
    TQ = s E dO S^T        TC = r b Uh dS^T        TR = E b dR S^T
    dQ = TQ + A K        dK = TC - TR + A^T Q + (Y + Y^T) K        dV = b dR        dbeta = <dR, Uh>
    M = tril(A Q K^T + Y K K^T, -1)
    dG_i = <TQ, Q>_i - <TR, K>_i - <TC, K>_i + sum_j M_ij - sum_j M_ji
    at the last token + sum_i <TC, K>_i + e^{G_C} <dS, S>
    dg = reverse cumulative sum of dG in the chunk, 0 where g lies on or below its floor
dQ and dK are sums over the value heads of a q/k head, in order, in fp32 registers, rounded once or
not at all. Row factors (s E, r b, E b) multiply fp32 sums over values; A and Y alone are rounded on
the way, to bf16. dG has no rounded number in it: both its sides have M from the same registers, and
not the diagonal of A, which would cancel. So dg keeps its digits where the gate is strong. dbeta is
the diagonal of the product that Y is made of.

Grid: as many programs as multiprocessors; each takes one (chunk, q/k head) after another. Two warp
groups own 64 key columns each of dQ and dK; the first makes A for both, the second Y. Four single
warps: one loads the tapes; one makes the vectors of a value head, loads Q and K, and turns into dg
what the others leave of dG; one has dV, one <dS, S> (gradients_warps.py).

Timeline of a value head in a group: dO Uh^T and Q K^T (dR Uh^T and K K^T), A (Y) and M; dO S^T and
dR S^T; Uh dS^T; and, once A and Y are both there, their products with K and Q. No chunk waits for
another: while a group computes, the other's products run, and loads always do.

Shared memory, 218 KB: a ring of ten tiles of 16 KB, [64, 128] each, of which a value head takes
seven: Uh, dO, dR, then keys 0 to 63 of S and of dS, then keys 64 to 127. Tiles are handed back one
by one. Q and K, 32 KB, where dQ and dK leave from, too; A and Y, 16 KB; vectors and parts of dG of
two heads, 9 KB.

Barriers: full and empty of each tile. Empty takes twelve arrivals, in equal parts of those who read
the tile (Uh and dO: both groups; dR: they and dV's warp; S and dS: one group) and the warp of
<dS, S>. By parity of the value head: there (its vectors), left (its parts of dG: two groups and two
warps), which also says that the vectors were read; the warp that waits for it writes them anew, so
there says that the parts were read. Q and K: arrived, gone (both groups). A and Y: made, used (both
groups). Ordinary stores that tensor cores or the copy engine read are fenced before the barrier
that tells of them.

Note [Parities]: a barrier's parity tells its last phase from the one before, not from the one
before that, and tiles may arrive out of order. So who skips a load of a tile must not wait for the
next one before the skipped one has come. Groups cannot: each has A and Y of the head before, of
which the other had all tiles of the one before that; and group 1, which skips keys 0 to 63 of S,
waits in the next head for keys 64 to 127 of dS, ten tiles on, only after those of S, which were
asked for when group 0 had given back dR, and so had seen what group 1 skipped. Nor can dV's warp,
which has the head's vectors: all of the head before the last was left. The warp of <dS, S> skips
none.

Note [Handing back]: an arrival does not wait for a load that nothing before it has used, and ptxas
puts a product of registers behind it; the copy engine may then overwrite what is still being read.
The warp of <dS, S> therefore stores a sum of its products before it hands a tile back (docs/log.md,
2026-11-30, a race in gradients). The compile gate looks for such loads: machine_code.py.

Note [Partitions]: warps that wait for a partition do so in a loop, and whatever a partition
computes from arguments alone leaves this loop for the start of the kernel, to be kept, or spilled,
through all partitions. From values that are opaque, or read from the hardware here and now, it
cannot. (What comes of the thread's number alone still does, a few words, none in a loop.)
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

from longdelta.kernels.gluon.dialect import async_store, barrier, follow, reinterpret
from longdelta.kernels.gluon.gradients_warps import (
    HEAD,
    RING,
    grid,
    here,
    load_tapes,
    make_vectors,
    store_dv,
    tiles_on,
    trace_states,
)
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import (
    FLAT,
    RAGGED,
    flat,
    from_bf16,
    in_place,
    quarters,
    ragged,
    to_bf16,
    whole,
)
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import Tables
from longdelta.runtime.launch import Program, programs, resolved


@gluon.jit
def _group(given, W: gl.constexpr, UNROUNDED: gl.constexpr):
    """64 key columns of dQ and dK from 64 W on, and A (W = 0) or Y (W = 1)."""
    stores, tasks, scale, smem = given
    dqd, dkd, dq_at, dk_at = stores
    chunks, n_tasks, H, GROUP = tasks
    H = here(H)
    GROUP = here(GROUP)
    start, stride = grid()
    ring, qs, ks, made_tiles, vectors, parts, bars = smem
    gs, bs, ses, ebs, rbs = vectors
    rows, kept, columns, betas = parts
    full, empty, there, left, arrived, gone, made, used = bars
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    R: gl.constexpr = gl.SliceLayout(1, L)
    LH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    LQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    QR: gl.constexpr = gl.SliceLayout(1, LQ)
    QC: gl.constexpr = gl.SliceLayout(0, LQ)
    qi = gl.arange(0, 64, layout=QR)[:, None]
    qj = gl.arange(0, 16, layout=QC)[None, :]
    q_own = (qi & 55) - (qj & 6)
    q_other = (qj & 9) - (qi & 8)
    n = 0
    s = 0
    phase = 0
    turn = 0
    for t in range(start, n_tasks, stride):
        dq = gl.zeros([64, 64], gl.float32, L)
        dk = gl.zeros([64, 64], gl.float32, L)
        for _ in range(GROUP):
            x = n & 1
            z = n >> 30
            q = qs.index(W + z)
            k = ks.index(W + z)
            A = made_tiles.index(z)
            Y = made_tiles.index(1 + z)
            o, o_phase = tiles_on(s, phase, 1)
            r, r_phase = tiles_on(s, phase, 2)
            a, a_phase = tiles_on(s, phase, 3 + 2 * W)
            d, d_phase = tiles_on(s, phase, 4 + 2 * W)
            uh = ring.index(s).permute((1, 0))

            mbarrier.wait(full.index(s), phase)
            p = gl.zeros([64, 64], gl.float32, L)
            if W == 0:
                mbarrier.wait(full.index(o), o_phase)
                p = warpgroup_mma(ring.index(o), uh, p, use_acc=False, is_async=True)
            else:
                mbarrier.wait(full.index(r), r_phase)
                p = warpgroup_mma(ring.index(r), uh, p, use_acc=False, is_async=True)
            mbarrier.wait(arrived, turn)
            m = gl.zeros([64, 64], gl.float32, L)
            for half in gl.static_range(2):
                if W == 0:
                    left_side = qs.index(half + z)
                else:
                    left_side = ks.index(half + z)
                m = warpgroup_mma(
                    left_side,
                    ks.index(half + z).permute((1, 0)),
                    m,
                    use_acc=half > 0,
                    is_async=True,
                )
            mbarrier.wait(there.index(x), (n >> 1) & 1)
            gi = gs.index(x).load(QR)[:, None]
            if W == 0:
                bi = scale
            else:
                bi = -bs.index(x).load(QR)[:, None]
            p, m = warpgroup_mma_wait(0, [p, m])
            ps = quarters(p, LH, LQ)
            ms = quarters(m, LH, LQ)
            tiles = ()
            sums = gl.zeros([64, 16], gl.float32, LQ)
            diagonal = gl.zeros([64, 16], gl.float32, LQ)
            for y in gl.static_range(4):
                gj = gs.index(x).slice(16 * y, 16).load(QC)[None, :]
                bj = bs.index(x).slice(16 * y, 16).load(QC)[None, :]
                if W == 1:
                    diagonal += gl.where(q_own == q_other + 16 * y, ps[y], 0.0)
                part = ps[y] * (bj * bi)
                strict = part * gl.exp2(gl.where(q_own > q_other + 16 * y, gi - gj, float("-inf")))
                if W == 0:
                    tiles = tiles + (to_bf16(gl.where(q_own == q_other + 16 * y, part, strict)),)
                else:
                    tiles = tiles + (to_bf16(strict),)
                part = ms[y] * strict
                sums += part
                part = gl.sum(part.reshape([4, 16, 16]), 1)
                columns.index(2 * x + W).slice(16 * y, 16, 1).store(part)
            tile = whole(tiles, LH, L)
            if W == 1:
                betas.index(x).store(gl.sum(diagonal, 1))
            mbarrier.wait(used, (n & 1) ^ 1)
            made_tiles.index(W).store(tile)
            fence_async_shared()
            barrier()
            mbarrier.arrive(made, count=1)
            row = gl.convert_layout(gl.sum(sums, 1), R, assert_trivial=True)

            state = ring.index(a).permute((1, 0))
            mbarrier.wait(full.index(o), o_phase)
            mbarrier.wait(full.index(a), a_phase)
            u = gl.zeros([64, 64], gl.float32, L)
            u = warpgroup_mma(ring.index(o), state, u, use_acc=False, is_async=True)
            mbarrier.wait(full.index(r), r_phase)
            v = gl.zeros([64, 64], gl.float32, L)
            v = warpgroup_mma(ring.index(r), state, v, use_acc=False, is_async=True)
            se = ses.index(x).load(R)
            queries = q.load(L)
            u = warpgroup_mma_wait(1, [u])
            row += se * gl.sum(u * from_bf16(queries), 1)
            dq += u * se[:, None]
            eb = ebs.index(x).load(R)
            keys = k.load(L)
            v = warpgroup_mma_wait(0, [v])
            barrier()
            mbarrier.arrive(empty.index(o), count=4)
            mbarrier.arrive(empty.index(r), count=3)
            mbarrier.arrive(empty.index(a), count=6)
            row -= eb * gl.sum(v * from_bf16(keys), 1)
            dk -= v * eb[:, None]

            mbarrier.wait(full.index(d), d_phase)
            w = gl.zeros([64, 64], gl.float32, L)
            w = warpgroup_mma(
                ring.index(s), ring.index(d).permute((1, 0)), w, use_acc=False, is_async=True
            )
            rb = rbs.index(x).load(R)
            w = warpgroup_mma_wait(0, [w])
            barrier()
            mbarrier.arrive(empty.index(s), count=4)
            mbarrier.arrive(empty.index(d), count=6)
            keep = rb * gl.sum(w * from_bf16(k.load(L)), 1)
            dk += w * rb[:, None]
            rows.index(2 * x + W).store(row - keep)
            kept.index(2 * x + W).store(keep)
            barrier()
            mbarrier.arrive(left.index(x), count=1)

            mbarrier.wait(made, n & 1)
            dq = warpgroup_mma(A, k, dq, is_async=True)
            dk = warpgroup_mma(A.permute((1, 0)), q, dk, is_async=True)
            dk = warpgroup_mma(Y, k, dk, is_async=True)
            dk = warpgroup_mma(Y.permute((1, 0)), k, dk, is_async=True)
            dq, dk = warpgroup_mma_wait(0, [dq, dk])
            barrier()
            mbarrier.arrive(used, count=1)
            n += 1
            s, phase = tiles_on(s, phase, HEAD)
        c = t // H
        hk = t - c * H
        top = gl.load(chunks + 2 * c)
        size = gl.load(chunks + 2 * c + 1)
        if UNROUNDED:
            place = (top.to(gl.int64) * H + hk) * 128 + 64 * W
            i = gl.arange(0, 64, layout=R)[:, None]
            j = gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
            at = i * (H * 128) + j
            gl.store(dq_at + place + at, dq, mask=i < size)
            gl.store(dk_at + place + at, dk, mask=i < size)
        else:
            # No one reads these tiles any more: whoever made A and Y was done with them.
            q = qs.index(W)
            k = ks.index(W)
            q.store(to_bf16(dq))
            k.store(to_bf16(dk))
            fence_async_shared()
            barrier()
            y = top + size
            z = 64 - size
            q_tile = reinterpret(q, gl.bfloat16, [1, 64, 1, 64], dqd.layout)
            async_store(dqd, [y, z, hk, 64 * W], q_tile)
            k_tile = reinterpret(k, gl.bfloat16, [1, 64, 1, 64], dkd.layout)
            async_store(dkd, [y, z, hk, 64 * W], k_tile)
            tma.store_wait(0)
            barrier()
        mbarrier.arrive(gone, count=1)
        turn ^= 1


@gluon.jit(do_not_specialize=["n_tasks", "H", "HV", "GROUP"])
def gradients_kernel(
    q_half,
    k_half,
    do_tile,
    S_tile,
    Uh_tile,
    dS_tile,
    dR_tile,
    dq_half,
    dk_half,
    G,
    g,
    beta,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    chunks,
    n_tasks,
    H,
    HV,
    GROUP,
    scale,
    UNROUNDED: gl.constexpr,
):
    follow()
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, 64, 128], tile)
    qs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    ks = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    made_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    gs = gl.allocate_shared_memory(gl.float32, [2, 64], vector)
    bs = gl.allocate_shared_memory(gl.float32, [2, 64], vector)
    ses = gl.allocate_shared_memory(gl.float32, [2, 64], vector)
    ebs = gl.allocate_shared_memory(gl.float32, [2, 64], vector)
    rbs = gl.allocate_shared_memory(gl.float32, [2, 64], vector)
    rows = gl.allocate_shared_memory(gl.float32, [4, 64], vector)
    kept = gl.allocate_shared_memory(gl.float32, [4, 64], vector)
    columns = gl.allocate_shared_memory(gl.float32, [4, 4, 64], matrix)
    betas = gl.allocate_shared_memory(gl.float32, [2, 64], vector)
    dots = gl.allocate_shared_memory(gl.float32, [2, 16], vector)
    sums = gl.allocate_shared_memory(gl.float32, [16], vector)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], bar)
    there = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    left = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    arrived = gl.allocate_shared_memory(gl.int64, [1], bar)
    gone = gl.allocate_shared_memory(gl.int64, [1], bar)
    made = gl.allocate_shared_memory(gl.int64, [1], bar)
    used = gl.allocate_shared_memory(gl.int64, [1], bar)
    for s in gl.static_range(RING):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=12)
    for x in gl.static_range(2):
        mbarrier.init(there.index(x), count=1)
        mbarrier.init(left.index(x), count=4)
    mbarrier.init(arrived, count=1)
    mbarrier.init(gone, count=2)
    mbarrier.init(made, count=2)
    mbarrier.init(used, count=2)
    fence_async_shared()
    tasks = (chunks, n_tasks, H, HV, GROUP)
    vectors = (gs, bs, ses, ebs, rbs)
    group_bars = (full, empty, there, left, arrived, gone, made, used)
    parts = (rows, kept, columns, betas)
    smem = (ring, qs, ks, made_tiles, vectors, parts, group_bars)
    group = ((dq_half, dk_half, dq, dk), (chunks, n_tasks, H, GROUP), scale, smem)
    values = (dv, tasks, (ring, bs, (full, empty, there, left)))
    trace = (n_tasks, GROUP, (ring, dots, sums, (full, empty, there, left)))
    flat_columns = reinterpret(columns, gl.float32, [16, 64], vector)
    ends = (gs, rows, kept, flat_columns, betas, dots)
    vector_smem = (qs, ks, vectors, ends, (there, left, arrived, gone))
    made_vectors = (q_half, k_half, (G, g, beta, dg, dbeta), tasks, scale, vector_smem)
    load = (do_tile, (S_tile, Uh_tile, dS_tile, dR_tile), tasks, (ring, full, empty))
    gl.warp_specialize(
        [
            (_group, (group, 0, UNROUNDED)),
            (_group, (group, 1, UNROUNDED)),
            (store_dv, (values,)),
            (trace_states, (trace,)),
            (load_tapes, (load,)),
            (make_vectors, (made_vectors,)),
        ],
        [4, 1, 1, 1, 1],
        [224, 56, 56, 56, 56],
    )


def _program(tables: DeviceTables, HV: int, H: int, scale: float, UNROUNDED: bool) -> Program:
    tasks = tables.walk.chunks * H
    return Program(
        gradients_kernel,
        programs(tasks, 1, tables.device),
        tables.device,
        tables.chunks,
        tasks,
        H,
        HV,
        HV // H,
        scale,
        UNROUNDED=UNROUNDED,
    )


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    do: Tensor,
    G: Tensor,
    S: Tensor,
    Uh: Tensor,
    dS: Tensor,
    dR: Tensor,
    scale: float,
    tables: Tables,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor,
) -> None:
    if tables.walk.used_rows < dv.shape[0]:
        for gradient in (dq, dk, dv, dg, dbeta):
            gradient[tables.walk.used_rows :] = 0
    q, k, do = in_place(q), in_place(k), in_place(do)
    unrounded = dq.dtype == torch.float32
    program = resolved(tables_of(tables), _program, g.shape[1], k.shape[1], scale, unrounded)
    qd = ragged(q, 64)
    program(
        qd,
        ragged(k, 64),
        ragged(do, 128),
        flat(S, 64, 128),
        flat(Uh, 64, 128),
        flat(dS, 64, 128),
        flat(dR, 64, 128),
        qd if unrounded else ragged(dq, 64),
        qd if unrounded else ragged(dk, 64),
        G,
        g,
        beta,
        dq,
        dk,
        dv,
        dg,
        dbeta,
    )


def _variant(name: str, unrounded: bool) -> Variant:
    half = f"tensordesc<bf16{[1, 64, 1, 64]},{RAGGED!r}>"
    tape = f"tensordesc<bf16{[64, 128]},{FLAT!r}>"
    types = {
        **dict.fromkeys(("q_half", "k_half", "dq_half", "dk_half"), half),
        **dict.fromkeys(("S_tile", "Uh_tile", "dS_tile", "dR_tile"), tape),
        "do_tile": f"tensordesc<bf16{[1, 64, 1, 128]},{RAGGED!r}>",
        **dict.fromkeys(("dq", "dk"), "*fp32" if unrounded else "*bf16"),
        "dv": "*bf16",
        **dict.fromkeys(("dg", "dbeta"), "*fp32"),
    }
    # 16 under Triton 3.6; 3.9 keeps more of what comes of the thread's number, one reload a loop.
    constants = {"UNROUNDED": unrounded}
    return Variant(
        name,
        gradients_kernel,
        112,
        constants,
        types=types,
        spills=72,
        others_handed_back=True,
    )


VARIANTS = (
    _variant("gradients", unrounded=False),
    _variant("gradients, unrounded", unrounded=True),
)
