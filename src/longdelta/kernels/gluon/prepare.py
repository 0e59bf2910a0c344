"""prepare: the gate's sum inside each chunk, and the chunk's unit inverse in the Z form.

    G_i = sum_{j <= i} max(g_j, -87)     N = tril(K K^T, -1), one for all value heads of a q/k head
    (I + D N)^-1 = I + D Z, D = diag(beta):    Z <- Z - (I + Z D) N_w (I + D Z),  w = 1, 2, 4, .. 32
One program makes N of one (chunk, q/k head) and Z of its value heads, two at a time. A warp holds
one 32 x 32 half of one of them: its two diagonal tiles of 16 are inverted and merged in registers,
since a fragment of an accumulator is, transposed, a fragment of the right operand; so Z and Z^T
are carried side by side and nothing moves between lanes. The last merge, of the two halves, passes
through shared memory. Tiles are numbered (r, head, half): tile r of that half of that head.

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longdelta.kernels.gluon.tables import tables_of
from longdelta.kernels.gluon.tiles import flat, in_place, split_product, to_bf16, to_fp16
from longdelta.kernels.stages import Tables
from longdelta.runtime.launch import launch

ROWS = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
"""Of 64-byte rows: eight of them lie in different banks."""
GATE_FLOOR = gl.constexpr(-87.0)
"""e^-87 is just above the smallest normal float32; a deeper floor costs later tokens digits."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _product(a, b, acc, SPLIT: gl.constexpr):
    """acc + a b of fp32 operands."""
    if SPLIT:
        acc = split_product(a, b, acc)
    else:
        acc = mma_v2(to_fp16(a), to_fp16(b), acc)
    return acc


@gluon.jit
def _invert_tiles(N, b, T: gl.constexpr, SPLIT: gl.constexpr):
    """Z and Z^T of 16 x 16 tiles, two per warp."""
    A: gl.constexpr = gl.DotOperandLayout(0, T, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, T, 2)
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, T)))[:, None][None, :, :]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, T)))[None, :][None, :, :]
    zero = gl.zeros([8, 16, 16], gl.float32, T)
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
        right_t = gl.convert_layout(gl.permute(right, (0, 2, 1)), B)
        Zt = Zt - _product(gl.convert_layout(Yt, A), right_t, zero, SPLIT)
    return Z, Zt


@gluon.jit
def _apart(x, T: gl.constexpr):
    """[8, ..] as its tiles r = 0 and r = 1, [4, ..] each."""
    both = gl.permute(gl.reshape(x, [2, 4, x.shape[1], x.shape[2]]), (1, 2, 3, 0))
    first, second = gl.split(both)
    return gl.convert_layout(first, T), gl.convert_layout(second, T)


@gluon.jit
def _put(tiles, row: gl.constexpr, column: gl.constexpr, x, SPLIT: gl.constexpr):
    """A 16 x 16 quadrant of every half, as operands of the last merge."""
    if SPLIT:
        x_head = to_bf16(x)
        tiles.index(0).slice(row, 16, 1).slice(column, 16, 2).store(x_head)
        x = to_bf16(x - x_head.to(gl.float32))
        tiles.index(1).slice(row, 16, 1).slice(column, 16, 2).store(x)
    else:
        plane = tiles.index(0)._reinterpret(gl.float16, [4, 32, 32], ROWS)
        plane.slice(row, 16, 1).slice(column, 16, 2).store(to_fp16(x))


@gluon.jit
def _put_product(links, x, SPLIT: gl.constexpr):
    """The product of the last merge so far, above the links."""
    if SPLIT:
        x_head = to_bf16(x)
        links.index(0).slice(0, 32, 1).store(x_head)
        links.index(1).slice(0, 32, 1).store(to_bf16(x - x_head.to(gl.float32)))
    else:
        plane = links.index(0)._reinterpret(gl.float16, [2, 64, 32], ROWS)
        plane.slice(0, 32, 1).store(to_fp16(x))


@gluon.jit
def _put_links(links, N, SPLIT: gl.constexpr):
    """The block of N below its diagonal halves, for both heads, as operands of the last merge."""
    L: gl.constexpr = N.type.layout
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, L))[None, :]
    x = gl.sum(gl.reshape(gl.where((i >= 32) & (j < 32), N, 0.0), [64, 2, 32]), 1)
    x = gl.reshape(x, [1, 64, 32])
    for h in gl.static_range(2):
        if SPLIT:
            x_head = to_bf16(x)
            links.index(0).slice(h, 1, 0).store(x_head)
            links.index(1).slice(h, 1, 0).store(to_bf16(x - x_head.to(gl.float32)))
        else:
            plane = links.index(0)._reinterpret(gl.float16, [2, 64, 32], ROWS)
            plane.slice(h, 1, 0).store(to_fp16(x))


@gluon.jit
def _operand(
    tiles,
    plane: gl.constexpr,
    start: gl.constexpr,
    turn: gl.constexpr,
    DTYPE: gl.constexpr,
    L: gl.constexpr,
):
    """Rows [start, start + 32) of both heads' 64, as an operand's head or tail."""
    whole = tiles.index(plane)._reinterpret(DTYPE, [2, 64, 32], ROWS)
    return whole.slice(start, 32, 1).permute(turn).load(L)


@gluon.jit
def _last_merge(
    halves,
    links,
    half: gl.constexpr,
    turn: gl.constexpr,
    start: gl.constexpr,
    U: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """A half (turned or not) times the transpose of 32 rows of the links, both heads."""
    A: gl.constexpr = gl.DotOperandLayout(0, U, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, U, 2)
    FLIP: gl.constexpr = (0, 2, 1)
    acc = gl.zeros([2, 32, 32], gl.float32, U)
    if SPLIT:
        a_head = _operand(halves, 0, half, turn, gl.bfloat16, A)
        b_head = _operand(links, 0, start, FLIP, gl.bfloat16, B)
        acc = mma_v2(_operand(halves, 1, half, turn, gl.bfloat16, A), b_head, acc)
        acc = mma_v2(a_head, _operand(links, 1, start, FLIP, gl.bfloat16, B), acc)
        acc = mma_v2(a_head, b_head, acc)
    else:
        a = _operand(halves, 0, half, turn, gl.float16, A)
        acc = mma_v2(a, _operand(links, 0, start, FLIP, gl.float16, B), acc)
    return acc


@gluon.jit
def _beside(x, y, upper):
    """[4, 16, 64]: x and y side by side, left where the half is the upper one, else right."""
    xs = gl.join(gl.where(upper, x, 0.0), gl.where(upper, 0.0, x))
    ys = gl.join(gl.where(upper, y, 0.0), gl.where(upper, 0.0, y))
    return gl.reshape(gl.permute(gl.join(xs, ys), (0, 1, 3, 4, 2)), [4, 16, 64])


@gluon.jit
def _solve(
    N,
    tiles,
    link_t,
    gate,
    b,
    g,
    beta,
    G,
    zd,
    zs,
    bs,
    gs,
    halves,
    links,
    at,
    size,
    slot,
    HV,
    GROUP,
    T: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Z and G of every value head of the group."""
    IN: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    VL: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    U: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, T, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, T, 2)
    flat3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, IN))[:, None]
    m = gl.arange(0, 4, layout=gl.SliceLayout(0, IN))[None, :]
    vh = gl.arange(0, 4, layout=gl.SliceLayout(1, VL))[:, None]
    vn = gl.arange(0, 64, layout=gl.SliceLayout(0, VL))[None, :]
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, T)))[:, None][:, :, None]
    i = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, T)))[:, None][None, :, :]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, T)))[None, :][None, :, :]
    zero = gl.zeros([4, 16, 16], gl.float32, T)
    zeros64 = gl.zeros([2, 32, 32], gl.float32, U)
    _put_links(links, N, SPLIT)
    _put(halves, 0, 16, zero, SPLIT)
    for block in range(0, GROUP, 4):
        held = gl.minimum(GROUP - block, 4)
        gs.permute((1, 0)).store(gate)
        turned = gl.permute(gl.reshape(b, [2, 2, 16, 2, 2]), (3, 1, 4, 0, 2))
        bs._reinterpret(
            gl.float32, [2, 2, 2, 2, 16], gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
        ).store(turned)
        following = (n < size) & (m < GROUP - block - 4)
        gate = gl.load(g + at + block + 4, mask=following, other=0.0)
        b = gl.load(beta + at + block + 4, mask=following, other=0.0)
        gl.thread_barrier()
        total = gl.associative_scan(gl.maximum(gs.load(VL), GATE_FLOOR), 1, _add)
        gl.store(G + (slot + block + vh).to(gl.int64) * 64 + vn, total, mask=vh < held)
        for pair in range((held + 1) // 2):
            column = bs.index(pair)._reinterpret(gl.float32, [8, 1, 16], flat3).load(T)
            z, zt = _invert_tiles(tiles, column, T, SPLIT)
            z11, z22 = _apart(z, T)
            z11_t, _ = _apart(zt, T)
            b1 = bs.index(pair).slice(0, 64)
            b2 = bs.index(pair).slice(64, 64)
            column1 = b1._reinterpret(gl.float32, [4, 1, 16], flat3).load(T)
            column2 = b2._reinterpret(gl.float32, [4, 1, 16], flat3).load(T)
            row1 = b1._reinterpret(gl.float32, [4, 16, 1], flat3).load(T)
            row2 = b2._reinterpret(gl.float32, [4, 16, 1], flat3).load(T)
            left = gl.where(i == j, 1.0, z11_t * column1)
            y_t = _product(gl.convert_layout(left, A), link_t, zero, SPLIT)
            right = gl.where(i == j, 1.0, z22 * column2)
            y = gl.convert_layout(gl.permute(y_t, (0, 2, 1)), B)
            z21 = zero - _product(gl.convert_layout(right, A), y, zero, SPLIT)
            upper = w % 2 == 0
            _put(halves, 0, 0, gl.where(i == j, 1.0, z11 * gl.where(upper, row1, column1)), SPLIT)
            _put(halves, 16, 0, z21 * gl.where(upper, row2, column1), SPLIT)
            _put(halves, 16, 16, gl.where(i == j, 1.0, z22 * gl.where(upper, row2, column2)), SPLIT)
            tma.store_wait(0)
            gl.thread_barrier()
            _put_product(links, _last_merge(halves, links, 0, (0, 2, 1), 32, U, SPLIT), SPLIT)
            whole = zs._reinterpret(gl.float16, [4, 32, 64], gl.NVMMASharedLayout(128, 16, rank=3))
            top_rows = _beside(z11, zero, upper)
            bottom_rows = _beside(z21, z22, upper)
            rows = gl.permute(gl.join(top_rows, bottom_rows), (0, 3, 1, 2))
            whole.store(to_fp16(gl.reshape(rows, [4, 32, 64])))
            gl.thread_barrier()
            last = zeros64 - _last_merge(halves, links, 32, (0, 1, 2), 0, U, SPLIT)
            both = zs._reinterpret(gl.float16, [2, 64, 64], gl.NVMMASharedLayout(128, 16, rank=3))
            both.slice(32, 32, 1).slice(0, 32, 2).store(to_fp16(last))
            fence_async_shared()
            gl.thread_barrier()
            h0 = block + 2 * pair
            tma.async_copy_shared_to_global(zd, [(slot + h0) * 64, 0], zs.index(0))
            if h0 + 1 < GROUP:
                tma.async_copy_shared_to_global(zd, [(slot + h0 + 1) * 64, 0], zs.index(1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["HV", "GROUP", "H"])
def prepare_kernel(k, g, beta, G, zd, chunks, HV, GROUP, H, k_t, k_h):
    KL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    IN: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    NL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    T: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    flat2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    flat4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    pid = gl.program_id(0)
    c = pid // H
    hk = pid - c * H
    row = gl.load(chunks + 2 * c)
    size = gl.load(chunks + 2 * c + 1)
    first = row.to(gl.int64) * HV + hk * GROUP
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, IN))[:, None]
    m = gl.arange(0, 4, layout=gl.SliceLayout(0, IN))[None, :]
    at = first + n * HV + m
    gate = gl.load(g + at, mask=(n < size) & (m < GROUP), other=0.0)
    b = gl.load(beta + at, mask=(n < size) & (m < GROUP), other=0.0)

    # N of the q/k head; its diagonal tiles, and the links between them, for two heads.
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
    top = b
    for block in range(4, GROUP, 4):
        there = (n < size) & (m < GROUP - block)
        top = gl.maximum(top, gl.load(beta + at + block, mask=there, other=0.0))
    length = gl.max(gl.max(gl.where(i == j, N, 0.0), 1), 0)
    split = length * gl.max(gl.max(top, 1), 0) > 1.02
    diagonal = gl.sum(gl.reshape(gl.where(i // 16 == j // 16, N, 0.0), [4, 16, 4, 16]), 2)
    diagonal = gl.permute(gl.reshape(diagonal, [2, 2, 16, 16]), (1, 0, 2, 3))
    diagonal = gl.reshape(diagonal, [2, 1, 32, 16])
    below = gl.where((i // 32 == j // 32) & (i // 16 > j // 16), N, 0.0)
    below = gl.reshape(gl.sum(gl.reshape(below, [4, 16, 4, 16]), 2), [1, 2, 32, 16])
    ds = gl.allocate_shared_memory(gl.float32, [8, 16, 16], flat3)
    ls = gl.allocate_shared_memory(gl.float32, [4, 32, 16], flat3)
    for h in gl.static_range(2):
        ds._reinterpret(gl.float32, [2, 2, 32, 16], flat4).slice(h, 1, 1).store(diagonal)
        ls._reinterpret(gl.float32, [2, 2, 32, 16], flat4).slice(h, 1, 0).store(below)
    gl.thread_barrier()
    tiles = ds.load(T)
    link_t = ls.slice(16, 16, 1).permute((0, 2, 1)).load(gl.DotOperandLayout(1, T, 2))

    halves = gl.allocate_shared_memory(gl.bfloat16, [2, 4, 32, 32], ROWS)
    links = gl.allocate_shared_memory(gl.bfloat16, [2, 2, 64, 32], ROWS)
    zs = gl.allocate_shared_memory(gl.float16, [2, 64, 64], zd.layout)
    gs = gl.allocate_shared_memory(gl.float32, [4, 64], flat2)
    bs = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    slot = c * HV + hk * GROUP
    if split:
        _solve(
            N,
            tiles,
            link_t,
            gate,
            b,
            g,
            beta,
            G,
            zd,
            zs,
            bs,
            gs,
            halves,
            links,
            at,
            size,
            slot,
            HV,
            GROUP,
            T,
            True,
        )
    else:
        _solve(
            N,
            tiles,
            link_t,
            gate,
            b,
            g,
            beta,
            G,
            zd,
            zs,
            bs,
            gs,
            halves,
            links,
            at,
            size,
            slot,
            HV,
            GROUP,
            T,
            False,
        )


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
        flat(Z, 64, 64),
        table,
        HV,
        HV // H,
        H,
        k.stride(0),
        k.stride(1),
        maxnreg=_REGISTERS,
    )
