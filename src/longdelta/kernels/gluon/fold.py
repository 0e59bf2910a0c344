"""fold: states at borders from summaries, strictly in document order, in fp32.

    S[leave] <- S[leave] + M S[enter]           adjoint: dS[enter] <- dS[enter] + M^T dS[leave]
First every M is split into a bf16 head and tail, all at once. Then one program folds COLUMNS value
columns of one (chain, value head), segment after segment: three products (head head, head tail,
tail head) with fp32 sums, which keep 16 bits of both operands. A ring of three M is always loading;
rows and states are read a step or two before they are needed.
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

from longdelta.kernels.gluon.tables import tables_of
from longdelta.kernels.gluon.tiles import flat, to_bf16
from longdelta.kernels.stages import Chains, Tables
from longdelta.runtime.launch import launch

_COLUMNS = 16


@gluon.jit
def split_kernel(M, head, tail):
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.program_id(0).to(gl.int64) * 4096 + gl.arange(0, 4096, layout=L)
    m = gl.load(M + at)
    h = to_bf16(m)
    gl.store(head + at, h)
    gl.store(tail + at, to_bf16(m - h.to(gl.float32)))


@gluon.jit
def _ask(hd, td, heads, tails, full, step, n, row, STAGES: gl.constexpr):
    """Asks for the M of a step, if there is one."""
    s = step % STAGES
    mbarrier.expect(full.index(s), 65536, pred=step < n)
    tma.async_copy_global_to_shared(hd, [row, 0], full.index(s), heads.index(s), pred=step < n)
    tma.async_copy_global_to_shared(td, [row, 0], full.index(s), tails.index(s), pred=step < n)


@gluon.jit(do_not_specialize=["chains", "HV"])
def fold_kernel(
    hd, td, S, table, chains, HV, ADJOINT: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, COLUMNS, 16])
    BLOCKS: gl.constexpr = 128 // COLUMNS
    FROM: gl.constexpr = 2 if ADJOINT else 1
    TO: gl.constexpr = 1 if ADJOINT else 2
    STEP: gl.constexpr = -3 if ADJOINT else 3
    TURN: gl.constexpr = (1, 0) if ADJOINT else (0, 1)
    thin: gl.constexpr = gl.NVMMASharedLayout(COLUMNS * 2, 16, rank=2)
    heads = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], hd.layout)
    tails = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], hd.layout)
    state_head = gl.allocate_shared_memory(gl.bfloat16, [128, COLUMNS], thin)
    state_tail = gl.allocate_shared_memory(gl.bfloat16, [128, COLUMNS], thin)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for p in gl.static_range(STAGES):
        mbarrier.init(full.index(p), count=1)
    block = gl.program_id(0) % BLOCKS
    h = (gl.program_id(0) // BLOCKS) % HV
    chain = gl.program_id(0) // (BLOCKS * HV)
    first = gl.load(table + chain)
    n = gl.load(table + chain + 1) - first
    end = n - 1
    steps = table + chains + 1 + first * 3
    if ADJOINT:
        steps += end * 3
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    at = h.to(gl.int64) * 16384 + r * 128 + c + block * COLUMNS
    stride = HV.to(gl.int64) * 16384
    for p in gl.static_range(STAGES - 1):
        row = (gl.load(steps + STEP * gl.minimum(p, end)) * HV + h) * 128
        _ask(hd, td, heads, tails, full, p, n, row, STAGES)
    m_next = gl.load(steps + STEP * gl.minimum(STAGES - 1, end))
    target = gl.load(steps + TO)
    to_next = gl.load(steps + STEP * gl.minimum(1, end) + TO)
    state = gl.load(S + gl.load(steps + FROM) * stride + at)
    own = gl.load(S + target * stride + at)
    for step in range(n):
        rounded = to_bf16(state)
        state_head.store(rounded)
        state_tail.store(to_bf16(state - rounded.to(gl.float32)))
        fence_async_shared()
        gl.thread_barrier()
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        m_head = heads.index(s).permute(TURN)
        m_tail = tails.index(s).permute(TURN)
        zero = gl.zeros([128, COLUMNS], gl.float32, L)
        small = warpgroup_mma(m_head, state_tail, zero, use_acc=False, is_async=True)
        other = warpgroup_mma(m_tail, state_head, zero, use_acc=False, is_async=True)
        large = warpgroup_mma(m_head, state_head, zero, use_acc=False, is_async=True)
        ahead = step + STAGES - 1
        _ask(hd, td, heads, tails, full, ahead, n, (m_next * HV + h) * 128, STAGES)
        m_next = gl.load(steps + STEP * gl.minimum(ahead + 1, end))
        to_after = gl.load(steps + STEP * gl.minimum(step + 2, end) + TO)
        own_next = gl.load(S + to_next * stride + at)
        small, other, large = warpgroup_mma_wait(0, [small, other, large])
        state = own + (large + (small + other))
        gl.store(S + target * stride + at, state)
        gl.thread_barrier()
        target = to_next
        to_next = to_after
        own = own_next


def _fold(M: Tensor, tables: Tables, chains: Chains, S: Tensor, adjoint: bool) -> None:
    table, count = tables_of(tables).fold(chains)
    if not count:
        return
    HV = S.shape[1]
    head = torch.empty(M.shape, dtype=torch.bfloat16, device=M.device)
    tail = torch.empty_like(head)
    launch(split_kernel, M.numel() // 4096, M, M, head, tail)
    launch(
        fold_kernel,
        count * HV * (128 // _COLUMNS),
        S,
        flat(head, 128, 128),
        flat(tail, 128, 128),
        S,
        table,
        count,
        HV,
        num_warps=8,
        ADJOINT=adjoint,
        COLUMNS=_COLUMNS,
        STAGES=3,
    )


def fold(M: Tensor, tables: Tables, chains: Chains, *, S: Tensor) -> None:
    _fold(M, tables, chains, S, adjoint=False)


def adjoint_fold(M: Tensor, tables: Tables, chains: Chains, *, dS: Tensor) -> None:
    _fold(M, tables, chains, dS, adjoint=True)
