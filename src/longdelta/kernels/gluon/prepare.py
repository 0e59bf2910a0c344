"""prepare: the gate's sum inside each chunk, and the chunk's unit inverse in the Z form.

    G_i = sum_{j <= i} max(g_j, -87)       N = tril(K K^T, -1), one for all value heads of a q/k head
    (I + D N)^-1 = I + D Z, D = diag(beta):    Z <- Z - (I + Z D) N_w (I + D Z),  w = 1, 2, 4, .. 32
One program makes N of one (chunk, q/k head) and Z of each of its value heads. The four 16 x 16
diagonal tiles are inverted one per warp, in registers: a fragment of an accumulator is, transposed,
a fragment of the right operand, so Z and Z^T are carried side by side and nothing moves between
lanes. The merges to 32 and 64 pass through shared memory.

Operands are fp16. Where beta |k|^2 exceeds 1 each is split into a bf16 head and tail instead (three
products): what cancels there needs 16 bits, and entries that leave the range of fp16 stay finite
until they are stored, saturating.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longdelta.kernels.gluon.tables import tables_of
from longdelta.kernels.gluon.tiles import in_place, split_product, to_fp16
from longdelta.kernels.stages import Tables
from longdelta.runtime.launch import launch

GATE_FLOOR = gl.constexpr(-87.0)
"""e^-87 is just above the smallest normal float32; a deeper floor costs later tokens their digits."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _product(a, b, acc, SPLIT: gl.constexpr):
    """acc + a b with fp16 operands, or with split ones."""
    if SPLIT:
        acc = split_product(a, b, acc)
    else:
        acc = mma_v2(to_fp16(a), to_fp16(b), acc)
    return acc


@gluon.jit
def _invert_tiles(N, b, T: gl.constexpr, SPLIT: gl.constexpr):
    """Z of the 16 x 16 tiles N [4, 16, 16], one per warp."""
    A: gl.constexpr = gl.DotOperandLayout(0, T, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, T, 2)
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, T)))[:, None][None, :, :]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, T)))[None, :][None, :, :]
    zero = gl.zeros([4, 16, 16], gl.float32, T)
    Z = zero - gl.where((i // 2 == j // 2) & (i > j), N, 0.0)
    Zt = gl.convert_layout(gl.permute(Z, (0, 2, 1)), T)
    for level in gl.static_range(1, 4):
        w = 2**level
        link = gl.where((i // (2 * w) == j // (2 * w)) & (i // w > j // w), N, 0.0)
        link_t = gl.convert_layout(gl.permute(link, (0, 2, 1)), B)
        left = gl.where(i == j, 1.0, Zt * b)
        Yt = _product(gl.convert_layout(left, A), link_t, zero, SPLIT)
        right = gl.where(i == j, 1.0, Z * b)
        Y = gl.convert_layout(gl.permute(Yt, (0, 2, 1)), B)
        Z = Z - _product(gl.convert_layout(right, A), Y, zero, SPLIT)
        if level < 3:
            right_t = gl.convert_layout(gl.permute(right, (0, 2, 1)), B)
            Zt = Zt - _product(gl.convert_layout(Yt, A), right_t, zero, SPLIT)
    return Z


@gluon.jit
def _merge(z11_t, z22, link_t, b1, b2, i, j, inner, inner_t, outer, zero, A: gl.constexpr, B: gl.constexpr,
           SPLIT: gl.constexpr):
    """outer = -(I + Z22 D2) N21 (I + D1 Z11), the product of the last two through `inner`."""
    left = gl.where(i == j, 1.0, z11_t.load(A) * b1)
    inner.store(_product(left, link_t, zero, SPLIT))
    right = gl.where(i == j, 1.0, z22.load(A) * b2)
    gl.thread_barrier()
    outer.store(zero - _product(right, inner_t.load(B), zero, SPLIT))
    gl.thread_barrier()


@gluon.jit
def _invert(tiles, link32_t, link64_t, bs, halves, work, z21, T: gl.constexpr, P: gl.constexpr, Q: gl.constexpr,
            SPLIT: gl.constexpr):
    """Z of one value head: the diagonal 32 x 32 halves, and the block below them."""
    PA: gl.constexpr = gl.DotOperandLayout(0, P, 2)
    PB: gl.constexpr = gl.DotOperandLayout(1, P, 2)
    QA: gl.constexpr = gl.DotOperandLayout(0, Q, 2)
    QB: gl.constexpr = gl.DotOperandLayout(1, Q, 2)
    flat3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    rows3: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])
    rows2: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    tb = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, T)))[:, None][:, :, None]
    z = _invert_tiles(tiles, bs._reinterpret(gl.float32, [4, 1, 16], flat3).load(T), T, SPLIT)
    even = gl.where(tb % 2 == 0, z, 0.0)
    odd = gl.where(tb % 2 == 1, z, 0.0)
    both = gl.reshape(gl.permute(gl.join(even, odd), (0, 1, 3, 2)), [64, 32])
    halves._reinterpret(gl.float32, [64, 32], rows2).store(both)
    gl.thread_barrier()
    zs = halves._reinterpret(gl.float32, [2, 32, 32], rows3)
    pi = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, PA)))[:, None][None, :, :]
    pj = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, PA)))[None, :][None, :, :]
    pairs = bs._reinterpret(gl.float32, [2, 2, 16], flat3)
    upper = work._reinterpret(gl.float32, [2, 16, 32], rows3).slice(0, 16, 2)
    _merge(
        zs.slice(0, 16, 1).slice(0, 16, 2).permute((0, 2, 1)), zs.slice(16, 16, 1).slice(16, 16, 2), link32_t,
        pairs.slice(0, 1, 1).load(PA), pairs.slice(1, 1, 1).load(PA), pi, pj, upper, upper.permute((0, 2, 1)),
        zs.slice(16, 16, 1).slice(0, 16, 2), gl.zeros([2, 16, 16], gl.float32, P), PA, PB, SPLIT,
    )
    qi = gl.arange(0, 32, layout=gl.SliceLayout(1, QA))[:, None]
    qj = gl.arange(0, 32, layout=gl.SliceLayout(0, QA))[None, :]
    b1 = bs.slice(0, 32).load(gl.SliceLayout(0, QA))[None, :]
    b2 = bs.slice(32, 32).load(gl.SliceLayout(0, QA))[None, :]
    _merge(
        halves.index(0).permute((1, 0)), halves.index(1), link64_t, b1, b2, qi, qj, work, work.permute((1, 0)),
        z21, gl.zeros([32, 32], gl.float32, Q), QA, QB, SPLIT,
    )


@gluon.jit(do_not_specialize=["HV", "GROUP", "H"])
def prepare_kernel(k, g, beta, G, Z, chunks, HV, GROUP, H, k_t, k_h):
    KL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    NL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    T: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    P: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 1, 2], [1, 16, 8])
    Q: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    IN: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    VL: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    OL: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    flat1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows2: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    rows3: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])
    pid = gl.program_id(0)
    c = pid // H
    hk = pid - c * H
    row = gl.load(chunks + 2 * c)
    size = gl.load(chunks + 2 * c + 1)
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, IN))[:, None]
    m = gl.arange(0, 4, layout=gl.SliceLayout(0, IN))[None, :]
    at = (row + n).to(gl.int64) * HV + hk * GROUP + m
    there = (n < size) & (m < GROUP)
    gate = gl.load(g + at, mask=there, other=0.0)
    b = gl.load(beta + at, mask=there, other=0.0)

    # N of the q/k head: the diagonal tiles, and the links of the two merges as right operands.
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
    tiles = gl.where(i // 16 == j // 16, N, 0.0)
    tiles = gl.convert_layout(gl.sum(gl.reshape(tiles, [4, 16, 4, 16]), 2), T)
    ti = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, T)))[:, None][None, :, :]
    tj = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, T)))[None, :][None, :, :]
    norms = gl.allocate_shared_memory(gl.float32, [64], flat1)
    norms._reinterpret(gl.float32, [4, 16], flat2).store(gl.sum(gl.where(ti == tj, tiles, 0.0), 2))
    links = gl.where((i // 32 == j // 32) & (i // 16 > j // 16), N, 0.0)
    links = gl.sum(gl.reshape(links, [4, 16, 4, 16]), 2)
    halves = gl.allocate_shared_memory(gl.float32, [2, 32, 32], rows2)
    ls = halves._reinterpret(gl.float32, [64, 32], rows2).slice(0, 16, 1)
    ls.store(gl.reshape(links, [64, 16]))
    lower = gl.sum(gl.reshape(gl.where((i >= 32) & (j < 32), N, 0.0), [64, 2, 32]), 1)
    ns = gl.allocate_shared_memory(gl.float32, [64, 32], rows2)
    ns.store(lower)
    gl.thread_barrier()
    link64_t = ns.slice(32, 32, 0).permute((1, 0)).load(gl.DotOperandLayout(1, Q, 2))
    pairs = halves._reinterpret(gl.float32, [2, 32, 32], rows3).slice(16, 16, 1).slice(0, 16, 2)
    link32_t = pairs.permute((0, 2, 1)).load(gl.DotOperandLayout(1, P, 2))

    work = gl.allocate_shared_memory(gl.float32, [32, 32], rows2)
    z21 = gl.allocate_shared_memory(gl.float32, [32, 32], rows2)
    gs = gl.allocate_shared_memory(gl.float32, [4, 64], flat2)
    bs = gl.allocate_shared_memory(gl.float32, [4, 64], flat1)
    b2 = bs._reinterpret(gl.float32, [4, 64], flat2)
    vh = gl.arange(0, 4, layout=gl.SliceLayout(1, VL))[:, None]
    vn = gl.arange(0, 64, layout=gl.SliceLayout(0, VL))[None, :]
    oi = gl.arange(0, 32, layout=gl.SliceLayout(1, OL))[:, None]
    oj = gl.arange(0, 32, layout=gl.SliceLayout(0, OL))[None, :]
    for block in range(0, GROUP, 4):
        h0 = hk * GROUP + block
        held = gl.minimum(GROUP - block, 4)
        gs.permute((1, 0)).store(gate)
        b2.permute((1, 0)).store(b)
        gl.thread_barrier()
        following = (n < size) & (m < GROUP - block - 4)
        gate = gl.load(g + at + block + 4, mask=following, other=0.0)
        b = gl.load(beta + at + block + 4, mask=following, other=0.0)
        total = gl.associative_scan(gl.maximum(gs.load(VL), GATE_FLOOR), 1, _add)
        slot = (c * HV + h0).to(gl.int64)
        gl.store(G + (slot + vh) * 64 + vn, total, mask=vh < held)
        for h in range(held):
            if gl.max(bs.index(h).load(EACH) * norms.load(EACH), 0) > 1.02:
                _invert(tiles, link32_t, link64_t, bs.index(h), halves, work, z21, T, P, Q, True)
            else:
                _invert(tiles, link32_t, link64_t, bs.index(h), halves, work, z21, T, P, Q, False)
            out = Z + (slot + h) * 4096 + oi * 64 + oj
            gl.store(out, to_fp16(halves.index(0).load(OL)))
            gl.store(out + 32, gl.full([32, 32], 0.0, gl.float16, OL))
            gl.store(out + 2048, to_fp16(z21.load(OL)))
            gl.store(out + 2080, to_fp16(halves.index(1).load(OL)))
            gl.thread_barrier()


_REGISTERS = 128
"""Of a thread: four programs a multiprocessor."""


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
        maxnreg=_REGISTERS,
    )
