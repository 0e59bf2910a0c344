"""prepare: the gate's sum inside each chunk, and the chunk's unit inverse in the Z form.

    G_i = sum_{j <= i} max(g_j, -87)       N = tril(K K^T, -1), one for all value heads of a q/k head
    (I + D N)^-1 = I + D Z, D = diag(beta):    Z <- Z - (I + Z D) N_w (I + D Z),  w = 1, 2, 4, .. 32
One program makes N of one (chunk, q/k head) and Z of each of its value heads. The four 16 x 16
diagonal tiles are inverted one per warp, in registers: a fragment of an accumulator is, transposed,
a fragment of the right operand, so Z and Z^T are carried side by side and nothing moves between
lanes. The merges to 32 and 64 pass through shared memory.

Every operand is split into a bf16 head and tail (three products): the inverse keeps 16 bits, beta
up to 2 included, and entries that leave the range of fp16 (keys longer than 1) stay finite until
they are stored, saturating.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longdelta.kernels.gluon.tiles import to_bf16, to_fp16

GATE_FLOOR = gl.constexpr(-87.0)
"""e^-87 is just above the smallest normal float32; a deeper floor costs later tokens their digits."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _product(a, b, acc):
    """acc + a b, to 16 bits of each operand."""
    a_head = to_bf16(a)
    b_head = to_bf16(b)
    acc = mma_v2(to_bf16(a - a_head.to(gl.float32)), b_head, acc)
    acc = mma_v2(a_head, to_bf16(b - b_head.to(gl.float32)), acc)
    return mma_v2(a_head, b_head, acc)


@gluon.jit
def _invert_tiles(N, b, T: gl.constexpr):
    """Z of the 16 x 16 tiles N [4, 16, 16], unit lower inverses without their factors b."""
    A: gl.constexpr = gl.DotOperandLayout(0, T, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, T, 2)
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, T)))[:, None][None, :, :]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, T)))[None, :][None, :, :]
    zero = gl.zeros([4, 16, 16], gl.float32, T)
    pair = (i // 2 == j // 2) & (i > j)
    Z = zero - gl.where(pair, N, 0.0)
    Zt = gl.convert_layout(gl.permute(Z, (0, 2, 1)), T)
    for level in gl.static_range(1, 4):
        w = 2**level
        linked = (i // (2 * w) == j // (2 * w)) & (i // w > j // w)
        link = gl.where(linked, N, 0.0)
        left = gl.where(i == j, 1.0, Zt * b)
        Yt = _product(
            gl.convert_layout(left, A), gl.convert_layout(gl.permute(link, (0, 2, 1)), B), zero
        )
        right = gl.where(i == j, 1.0, Z * b)
        Y = gl.convert_layout(gl.permute(Yt, (0, 2, 1)), B)
        Z = Z - _product(gl.convert_layout(right, A), Y, zero)
        if level < 3:
            right_t = gl.convert_layout(gl.permute(right, (0, 2, 1)), B)
            Zt = Zt - _product(gl.convert_layout(Yt, A), right_t, zero)
    return Z


@gluon.jit
def _merge(
    z11_t, z22, link_t, b1, b2, inner, outer, BATCH: gl.constexpr, W: gl.constexpr, L: gl.constexpr
):
    """outer = -(I + Z22 D2) N21 (I + D1 Z11); inner holds the product of the last two, transposed."""
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    if BATCH:
        i = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(0, A)))[:, None][None, :, :]
        j = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(0, A)))[None, :][None, :, :]
        zero = gl.zeros([2, W, W], gl.float32, L)
        turn: gl.constexpr = (0, 2, 1)
    else:
        i = gl.arange(0, W, layout=gl.SliceLayout(1, A))[:, None]
        j = gl.arange(0, W, layout=gl.SliceLayout(0, A))[None, :]
        zero = gl.zeros([W, W], gl.float32, L)
        turn: gl.constexpr = (1, 0)
    left = gl.where(i == j, 1.0, z11_t.load(A) * b1)
    inner.store(_product(left, link_t, zero))
    right = gl.where(i == j, 1.0, z22.load(A) * b2)
    gl.thread_barrier()
    outer.store(zero - _product(right, inner.permute(turn).load(B), zero))
    gl.thread_barrier()


@gluon.jit(do_not_specialize=["HV", "GROUP", "H"])
def prepare_kernel(k, g, beta, G, Z, chunks, HV, GROUP, H, k_t, k_h):
    KL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    NL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    T: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    P: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 1, 2], [1, 16, 8])
    Q: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    PA: gl.constexpr = gl.DotOperandLayout(0, P, 2)
    PB: gl.constexpr = gl.DotOperandLayout(1, P, 2)
    QA: gl.constexpr = gl.DotOperandLayout(0, Q, 2)
    QB: gl.constexpr = gl.DotOperandLayout(1, Q, 2)
    VL: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    OL: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    plain2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    plain3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    pid = gl.program_id(0)
    c = pid // H
    hk = pid - c * H
    row = gl.load(chunks + 2 * c)
    size = gl.load(chunks + 2 * c + 1)

    # N of the q/k head, cut into the links of each merge.
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ks = gl.allocate_shared_memory(gl.bfloat16, [64, 128], tile)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, KL))[:, None]
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, KL))[None, :]
    source = k + (row + r).to(gl.int64) * k_t + hk.to(gl.int64) * k_h + d
    ks.store(gl.load(source, mask=r < size, other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    N = gl.zeros([64, 64], gl.float32, NL)
    N = warpgroup_mma(ks, ks.permute((1, 0)), N, use_acc=False, is_async=True)
    N = warpgroup_mma_wait(0, [N])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, NL))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, NL))[None, :]
    tiles = gl.where((i // 16 == j // 16) & (i > j), N, 0.0)
    tiles = gl.convert_layout(gl.sum(gl.reshape(tiles, [4, 16, 4, 16]), 2), T)
    ns = gl.allocate_shared_memory(gl.float32, [64, 64], plain2)
    ns.store(N)
    gl.thread_barrier()
    link64_t = ns.slice(32, 32, 0).slice(0, 32, 1).permute((1, 0)).load(QB)
    links = gl.where((i // 32 == j // 32) & (i // 16 > j // 16), N, 0.0)
    links = gl.sum(gl.sum(gl.reshape(links, [2, 2, 16, 4, 16]), 3), 1)
    ls = gl.allocate_shared_memory(gl.float32, [2, 16, 16], plain3)
    ls.store(links)
    gl.thread_barrier()
    link32_t = ls.permute((0, 2, 1)).load(PB)

    halves = gl.allocate_shared_memory(gl.float32, [2, 32, 32], plain2)
    zs = halves._reinterpret(gl.float32, [2, 32, 32], plain3)
    z2 = halves._reinterpret(gl.float32, [64, 32], plain2)
    inner = gl.allocate_shared_memory(gl.float32, [32, 32], plain2)
    inner32 = inner._reinterpret(gl.float32, [2, 16, 16], plain3)
    z21 = gl.allocate_shared_memory(gl.float32, [32, 32], plain2)
    n = gl.arange(0, 64, layout=VL)
    tb = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, T)))[:, None][:, :, None]
    tj = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, T)))[None, :][None, :, :]
    pb = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, PA)))[:, None][:, :, None]
    pj = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, PA)))[None, :][None, :, :]
    qj = gl.arange(0, 32, layout=gl.SliceLayout(0, QA))[None, :]
    oi = gl.arange(0, 32, layout=gl.SliceLayout(1, OL))[:, None]
    oj = gl.arange(0, 32, layout=gl.SliceLayout(0, OL))[None, :]
    for h in range(hk * GROUP, (hk + 1) * GROUP):
        bh = beta + row.to(gl.int64) * HV + h
        gh = g + row.to(gl.int64) * HV + h
        t_at = tb * 16 + tj
        t_b = gl.load(bh + t_at * HV, mask=t_at < size, other=0.0)
        p_at = pb * 32 + pj
        p_b1 = gl.load(bh + p_at * HV, mask=p_at < size, other=0.0)
        p_b2 = gl.load(bh + (p_at + 16) * HV, mask=p_at + 16 < size, other=0.0)
        q_b1 = gl.load(bh + qj * HV, mask=qj < size, other=0.0)
        q_b2 = gl.load(bh + (qj + 32) * HV, mask=qj + 32 < size, other=0.0)
        gate = gl.load(gh + n * HV, mask=n < size, other=0.0)
        slot = (c * HV + h).to(gl.int64)
        gl.store(G + slot * 64 + n, gl.associative_scan(gl.maximum(gate, GATE_FLOOR), 0, _add))
        z = _invert_tiles(tiles, t_b, T)
        even = gl.where(tb % 2 == 0, z, 0.0)
        odd = gl.where(tb % 2 == 1, z, 0.0)
        z2.store(gl.reshape(gl.permute(gl.join(even, odd), (0, 1, 3, 2)), [64, 32]))
        gl.thread_barrier()
        z11 = zs.slice(0, 16, 1).slice(0, 16, 2)
        z22 = zs.slice(16, 16, 1).slice(16, 16, 2)
        lower = zs.slice(16, 16, 1).slice(0, 16, 2)
        _merge(z11.permute((0, 2, 1)), z22, link32_t, p_b1, p_b2, inner32, lower, True, 16, P)
        _merge(
            halves.index(0).permute((1, 0)),
            halves.index(1),
            link64_t,
            q_b1,
            q_b2,
            inner,
            z21,
            False,
            32,
            Q,
        )
        out = Z + slot * 4096 + oi * 64 + oj
        gl.store(out, to_fp16(halves.index(0).load(OL)))
        gl.store(out + 32, gl.full([32, 32], 0.0, gl.float16, OL))
        gl.store(out + 2048, to_fp16(z21.load(OL)))
        gl.store(out + 2080, to_fp16(halves.index(1).load(OL)))
        gl.thread_barrier()


def prepare(k: Tensor, g: Tensor, beta: Tensor, tables: Tables, *, G: Tensor, Z: Tensor) -> None:
    chunks, HV, H = tables.walk.chunks, g.shape[1], k.shape[1]
    k = in_place(k.to(torch.bfloat16))
    table = tables_of(tables).chunks
    launch(
        prepare_kernel,
        chunks * H,
        k,
        k,
        g,
        beta,
        G,
        Z,
        table,
        HV,
        HV // H,
        H,
        k.stride(0),
        k.stride(1),
        maxnreg=128,
    )
