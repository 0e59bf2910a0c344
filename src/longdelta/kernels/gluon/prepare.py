"""prepare: the gate's sum inside each chunk, and the chunk's unit inverse in the Z form.

    G_i = sum_{j <= i} max(g_j, -87)       N = K K^T, one for all value heads of a q/k head
    (I + D tril(N, -1))^-1 = X = I + D Z,  D = diag(beta),  W = I + Z D,  Z = -W tril(N, -1):
    inside a tile of 16    z_ij = -sum_{k > j} w_ik n_kj,  w_ij = z_ij beta_j,  w_ii = 1
    between tiles          Z_rc = -sum_{c < m <= r} W_rm (N_mc X_cc)
    bound = sum_i max(g_i, -87) + ln max(1, |1 - beta_i |k_i|^2|)
Both lines are substitution by rows, from the right: they multiply inverses of diagonal blocks, not
powers of N. Inside a tile everything is float32; a lane holds a row of one tile of each half, for
two value heads at once. Between tiles the operands are split into a bf16 head and tail (three
products, 16 bits), which is what cancels needs where beta |k|^2 exceeds 1; entries that leave the
range of fp16 stay finite until they are stored, saturating. A fragment of an accumulator is one of
the left operand and, turned, one of the right: between products nothing moves between lanes.

Grid: one program per (chunk, q/k head), or several with every so many pairs of value heads where
these would not fill the card. A program is a single warp and eight share a multiprocessor: what
one waits for passes behind the others. A head's bits do not depend on its neighbours.
Timeline: K by bulk copy, N in fragments; for two value heads G and the diagonal tiles, while g and
beta of the next two arrive; then head by head the other tiles and the bulk store of Z.
Shared memory, 22 KB: K; in its place later the diagonal tiles of N and Z of two heads, whose lower
half holds -Z of the diagonal tiles until the whole is written.
Barriers: one mbarrier for K, used once. The others order the one warp's own memory.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from longdelta.kernels import stages
from longdelta.kernels.gluon.dialect import async_load, async_store, barrier, follow, reinterpret
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import FLAT, RAGGED, add, flat, in_place, ragged, to_fp16
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import Tables
from longdelta.runtime import launch
from longdelta.runtime.launch import Program, resolved

GATE_FLOOR = gl.constexpr(stages.GATE_FLOOR)
LN2 = gl.constexpr(0.6931471805599453)
HEADS = gl.constexpr(2)
"""Value heads at a time: they share what is read of N."""
_BASES = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [5, 4], [0, 8], [8, 0]]
TILE = gl.constexpr(gl.SharedLinearLayout(_BASES))
"""16 x 16: written by rows, read as fragments, turned or not, from different banks each time."""
_EIGHT = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
TILES = gl.constexpr(gl.SharedLinearLayout([[0, 0, *x] for x in _BASES] + _EIGHT + [[1, 0, 0, 0]]))
"""Eight of them for each head."""
T = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, T.value, 2))
B = gl.constexpr(gl.DotOperandLayout(1, T.value, 2))
FLAT_1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT_2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT_4 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
FLAT_5 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]))


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _entries(x, n: gl.constexpr, L: gl.constexpr):
    """The last of four axes, which lies in one lane, as a tuple of n tensors."""
    shape: gl.constexpr = [x.shape[0], x.shape[1], x.shape[2]]
    halves = gl.reshape(x, [shape[0], shape[1], shape[2], 2, n // 2])
    low, high = gl.split(gl.permute(halves, (0, 1, 2, 4, 3)))
    if n == 2:
        low = gl.convert_layout(gl.reshape(low, shape), L, assert_trivial=True)
        high = gl.convert_layout(gl.reshape(high, shape), L, assert_trivial=True)
        result = (low, high)
    else:
        result = _entries(low, n // 2, L) + _entries(high, n // 2, L)
    return result


@gluon.jit
def _joined(t, n: gl.constexpr):
    """The inverse of `_entries`."""
    if n == 2:
        x = gl.join(t[0], t[1])
    else:
        x = gl.join(_joined(t[: n // 2], n // 2), _joined(t[n // 2 :], n // 2))
        x = gl.permute(x, (0, 1, 2, 4, 3))
        x = gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], n])
    return x


@gluon.jit
def _operand(x, L: gl.constexpr):
    """Head and tail of a fragment, as an operand."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a, b;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 a, $0, 16;
        and.b32 b, $0, 0xffff0000;
        sub.f32 a, $2, a;
        sub.f32 b, $3, b;
        cvt.rn.bf16x2.f32 $1, b, a;
        }""",
        "=&r,=r,r,r",
        [gl.convert_layout(x, L, assert_trivial=True)],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _product(a, b, acc):
    """acc + a b: all but the product of the tails."""
    acc = mma_v2(a[1], b[0], acc)
    acc = mma_v2(a[0], b[1], acc)
    return mma_v2(a[0], b[0], acc)


@gluon.jit
def _invert_tiles(ns, bs):
    """-Z of two diagonal tiles [1, 2, 2, 16, 8] of N, for both heads."""
    R: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 2, 16, 1], [1, 1, 1, 1], [3, 2, 1, 0])
    N: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 1, 8], [1, 2, 1, 16, 1], [1, 1, 1, 1, 1], [4, 2, 3, 1, 0]
    )
    L: gl.constexpr = gl.SliceLayout(3, R)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    # Opaque: the compiler would keep sixteen comparisons from one pair of heads to the next.
    i = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1
    )
    z = ()
    w = ()
    for j in gl.static_range(15, -1, -1):
        if j % 4 == 3:
            b = _entries(bs.slice(j - 3, 4, 3).load(R), 4, L)
        n = gl.permute(ns.slice(j, 1, 3).load(N), (0, 1, 3, 2, 4))
        n = _entries(gl.reshape(n, [1, 2, 1, 16]), 16, L)
        acc = gl.zeros([HEADS, 2, 16], gl.float32, L)
        for k in gl.static_range(15, j, -1):
            acc += w[15 - k] * n[k]
        z = (acc,) + z
        # Not a sum with the unit row: that would be 16 numbers to keep.
        w = w + (gl.where(i == j, 1.0, (acc * -1.0) * b[j % 4]),)
    return _joined(z, 16)


@gluon.jit
def _between_tiles(zx, at: gl.constexpr, bs, links):
    """Z of one head, from -Z of its diagonal tiles zx[at ..]: a column of tiles after the other.

    links: transposes of the tiles of N below the diagonal, row by row.
    """
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, A))[:, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, A))[None, :]
    zero = gl.zeros([16, 16], gl.float32, T)
    left = ((),)
    rows = ()
    for r in gl.static_range(4):
        z = zx.index(at + r).load(A) * -1.0
        rows = rows + ((gl.convert_layout(to_fp16(z), T, assert_trivial=True),),)
        if r > 0:
            b = bs.slice(16 * r, 16).load(gl.SliceLayout(0, A))[None, :]
            left = left + ((_operand(gl.where(i == j, 1.0, z * b), A),),)
    for c in gl.static_range(2, -1, -1):
        b = bs.slice(16 * c, 16).load(gl.SliceLayout(0, A))[None, :]
        x = zx.index(at + c).permute((1, 0)).load(A) * b
        x = _operand(gl.where(i == j, -1.0, x), A)
        y = ()
        for m in gl.static_range(c + 1, 4):
            turned = _product(x, links[m * (m - 1) // 2 + c], zero)
            y = y + (_operand(gl.permute(turned, (1, 0)), B),)
        b = gl.convert_layout(b, T, assert_trivial=True)
        for r in gl.static_range(c + 1, 4):
            z = zero
            for m in gl.static_range(c + 1, r + 1):
                z = _product(left[r][r - m], y[m - c - 1], z)
            rows = rows[:r] + ((to_fp16(z),) + rows[r],) + rows[r + 1 :]
            if c > 0:
                left = left[:r] + (left[r] + (_operand(z * b, A),),) + left[r + 1 :]
    whole = ()
    for r in gl.static_range(4):
        row = rows[r]
        for _ in gl.static_range(r + 1, 4):
            row = row + (to_fp16(zero),)
        z = gl.join(gl.join(row[0], row[1]), gl.join(row[2], row[3]))
        whole = whole + (gl.reshape(gl.permute(z, (0, 3, 2, 1)), [16, 64]),)
    z = gl.join(gl.join(whole[0], whole[1]), gl.join(whole[2], whole[3]))
    return gl.reshape(gl.permute(z, (3, 2, 0, 1)), [64, 64])


@gluon.jit
def _key_products(ks):
    """The tiles of K K^T on and below the diagonal, row by row."""
    N = ()
    for _ in gl.static_range(10):
        N = N + (gl.zeros([16, 16], gl.float32, T),)
    for s in gl.static_range(4):
        part = ks.slice(32 * s, 32, 1)
        sums = ()
        turned = ()
        for r in gl.static_range(4):
            keys = part.slice(16 * r, 16, 0).load(A)
            turned = turned + (part.slice(16 * r, 16, 0).permute((1, 0)).load(B),)
            for c in gl.static_range(r + 1):
                sums = sums + (mma_v2(keys, turned[c], N[r * (r + 1) // 2 + c]),)
        N = sums
    return N


@gluon.jit(do_not_specialize=["HV", "GROUP", "H", "parts"])
def prepare_kernel(kd, g, beta, G, bound, zd, chunks, HV, GROUP, H, parts):
    follow()
    IN: gl.constexpr = gl.BlockedLayout([1, 1], [32 // HEADS, HEADS], [1, 1], [1, 0])
    SUM: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 1], [0, 1])
    pid = gl.program_id(0)
    task = pid // parts
    start = (pid - task * parts) * HEADS
    stride = parts * HEADS
    c = task // H
    hk = task - c * H
    row = gl.load(chunks + 2 * c)
    size = gl.load(chunks + 2 * c + 1)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ks = gl.allocate_shared_memory(gl.bfloat16, [64, 128], FLAT)
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, 16384)
    box = reinterpret(ks, gl.bfloat16, [1, 64, 1, 128], RAGGED)
    async_load(kd, [row + size, 64 - size, hk, 0], bar, box)

    n = gl.arange(0, 64, layout=gl.SliceLayout(1, IN))[:, None]
    m = gl.arange(0, HEADS, layout=gl.SliceLayout(0, IN))[None, :]
    first = row.to(gl.int64) * HV + hk * GROUP
    # In 32 bits and moved on by itself: the compiler would keep an address of each lane and load.
    at = n * HV + m + start
    there = (n < size) & (m + start < GROUP)
    gate = gl.load(g + first + at, mask=there, other=0.0)
    b = gl.load(beta + first + at, mask=there, other=0.0)

    mbarrier.wait(bar, 0)
    N = _key_products(ks)
    mbarrier.invalidate(bar)

    ns = gl.allocate_shared_memory(gl.float32, [2, 2, 2, 16, 8], FLAT_5)
    zs = gl.allocate_shared_memory(gl.float16, [HEADS, 64, 64], FLAT)
    bs = gl.allocate_shared_memory(gl.float32, [HEADS, 64], FLAT_1)
    gs = gl.allocate_shared_memory(gl.float32, [HEADS, 64], FLAT_2)
    ls = gl.allocate_shared_memory(gl.float32, [64], FLAT_1)
    zx = reinterpret(zs, gl.float32, [8 * HEADS, 16, 16], TILE)
    tiles = reinterpret(zs, gl.float32, [HEADS, 8, 16, 16], TILES)
    bs_rows = reinterpret(bs, gl.float32, [HEADS, 64], FLAT_2)
    bs_tiles = reinterpret(bs, gl.float32, [HEADS, 4, 1, 16], FLAT_4)
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, T))[:, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, T))[None, :]
    links = ()
    for r in gl.static_range(4):
        for q in gl.static_range(r):
            links = links + (_operand(gl.permute(N[r * (r + 1) // 2 + q], (1, 0)), B),)
        tile = N[r * (r + 1) // 2 + r]
        place = ns.slice(r // 2, 1, 0).slice(r % 2, 1, 1).permute((0, 1, 3, 2, 4))
        place.store(gl.reshape(tile, [1, 1, 16, 2, 8]))
        ls.slice(16 * r, 16).store(gl.sum(gl.where(i == j, tile, 0.0), 1))

    vn = gl.arange(0, 64, layout=gl.SliceLayout(1, SUM))[:, None]
    vm = gl.arange(0, HEADS, layout=gl.SliceLayout(0, SUM))
    slot = c * HV + hk * GROUP
    for block in range(start, GROUP, stride):
        bs_rows.permute((1, 0)).store(b)
        gs.permute((1, 0)).store(gl.where(gate < GATE_FLOOR, GATE_FLOOR, gate))
        at += stride
        there = (n < size) & (m + block + stride < GROUP)
        gate = gl.load(g + first + at, mask=there, other=0.0)
        b = gl.load(beta + first + at, mask=there, other=0.0)
        terms = gs.permute((1, 0)).load(SUM)
        total = gl.associative_scan(terms, 0, add)
        held = vm < GROUP - block
        sums_at = G + (slot + block).to(gl.int64) * 64 + vm[None, :] * 64 + vn
        gl.store(sums_at, total, mask=held[None, :])
        kept = 1.0 - bs_rows.permute((1, 0)).load(SUM) * ls.load(gl.SliceLayout(1, SUM))[:, None]
        kept = gl.abs(kept)
        terms += LN2 * _log2(gl.where(kept <= 1.0, 1.0, kept))
        gl.store(bound + slot + block + vm, gl.sum(terms, 0), mask=held)
        tma.store_wait(0)
        barrier()
        for half in gl.static_range(2):
            inner = _invert_tiles(ns.slice(half, 1, 0), bs_tiles.slice(2 * half, 2, 1))
            tiles.slice(4 + 2 * half, 2, 1).store(inner)
        for h in gl.static_range(HEADS):
            if block + h < GROUP:
                barrier()
                z = _between_tiles(zx, 8 * h + 4, bs.index(h), links)
                zs.index(h).store(z)
                fence_async_shared()
                barrier()
                async_store(zd, [(slot + block + h) * 64, 0], zs.index(h))
    tma.store_wait(0)


_REGISTERS = 255
_RESIDENT = 8
"""Programs of a multiprocessor, with so many registers of a thread."""


def _program(tables: DeviceTables, HV: int, H: int) -> Program:
    programs, pairs = tables.walk.chunks * H, -(-HV // H // HEADS.value)
    free = _RESIDENT * launch.multiprocessors(tables.device) // max(1, programs)
    parts = min(pairs, max(1, free))
    return Program(
        prepare_kernel,
        programs * parts,
        tables.device,
        tables.chunks,
        HV,
        HV // H,
        H,
        parts,
        num_warps=1,
        maxnreg=_REGISTERS,
    )


def prepare(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    tables: Tables,
    *,
    G: Tensor,
    Z: Tensor,
    bound: Tensor,
) -> None:
    k = in_place(k)  # held until the launch: a tile does not hold its memory
    program = resolved(tables_of(tables), _program, g.shape[1], k.shape[1])
    program(ragged(k, 128), g, beta, G, bound, flat(Z, 64, 64))


VARIANTS = (Variant("prepare", prepare_kernel, 0, options={"num_warps": 1, "maxnreg": _REGISTERS}),)
