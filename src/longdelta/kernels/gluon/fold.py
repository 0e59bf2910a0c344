"""fold: states at borders from summaries, strictly in document order, in fp32.

    S[leave] <- S[leave] + M S[enter]           adjoint: dS[enter] <- dS[enter] + M^T dS[leave]
One program folds COLUMNS value columns of one (chain, value head), segment after segment: three
products of bf16 heads and tails (head head, head tail, tail head) with fp32 sums, which keep 16
bits of both operands. M comes in fp32 through a ring of STAGES and is split into registers one step
ahead, while the products of the step before run. The state goes through shared memory, to two
places by turns: one barrier a step, behind which every warp is also done with the M of this step,
so that its stage may be filled anew. Rows and states are read a step or two before they are needed.
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

from longdelta.kernels.gluon.dialect import async_load, barrier
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import flat, to_bf16
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import Chains, Tables
from longdelta.runtime.launch import Program, resolved

_COLUMNS = 16


@gluon.jit
def _ask(md, maps, full, step, n, row, STAGES: gl.constexpr):
    """Asks for the M of a step, if there is one."""
    s = step % STAGES
    mbarrier.expect(full.index(s), 65536, pred=step < n)
    async_load(md, [row, 0], full.index(s), maps.index(s), pred=step < n)


@gluon.jit
def _split(x):
    head = to_bf16(x)
    return head, to_bf16(x - head.to(gl.float32))


@gluon.jit(do_not_specialize=["chains", "HV"])
def fold_kernel(
    md, S, table, chains, HV, ADJOINT: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, COLUMNS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    BLOCKS: gl.constexpr = 128 // COLUMNS
    FROM: gl.constexpr = 2 if ADJOINT else 1
    TO: gl.constexpr = 1 if ADJOINT else 2
    STEP: gl.constexpr = -3 if ADJOINT else 3
    TURN: gl.constexpr = (1, 0) if ADJOINT else (0, 1)
    thin: gl.constexpr = gl.NVMMASharedLayout(COLUMNS * 2, 16, rank=2)
    maps = gl.allocate_shared_memory(gl.float32, [STAGES, 128, 128], md.layout)
    heads = gl.allocate_shared_memory(gl.bfloat16, [2, 128, COLUMNS], thin)
    tails = gl.allocate_shared_memory(gl.bfloat16, [2, 128, COLUMNS], thin)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for p in gl.static_range(STAGES):
        mbarrier.init(full.index(p), count=1)
    fence_async_shared()
    block = gl.program_id(0) % BLOCKS
    h = (gl.program_id(0) // BLOCKS) % HV
    chain = gl.program_id(0) // (BLOCKS * HV)
    first = gl.load(table + chain)
    n = gl.load(table + chain + 1) - first
    end = n - 1
    steps = table + chains + 1 + first * 3
    if ADJOINT:
        steps = steps + end * 3
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    at = h.to(gl.int64) * 16384 + r * 128 + c + block * COLUMNS
    stride = HV.to(gl.int64) * 16384
    for p in gl.static_range(STAGES):
        row = (gl.load(steps + STEP * gl.minimum(p, end)) * HV + h) * 128
        _ask(md, maps, full, p, n, row, STAGES)
    m_next = gl.load(steps + STEP * gl.minimum(STAGES, end))
    target = gl.load(steps + TO)
    to_next = gl.load(steps + STEP * gl.minimum(1, end) + TO)
    state = gl.load(S + gl.load(steps + FROM) * stride + at)
    own = gl.load(S + target * stride + at)
    mbarrier.wait(full.index(0), 0)
    m_head, m_tail = _split(maps.index(0).permute(TURN).load(A))
    for step in range(n):
        head, tail = _split(state)
        heads.index(step % 2).store(head)
        tails.index(step % 2).store(tail)
        fence_async_shared()
        barrier()
        zero = gl.zeros([128, COLUMNS], gl.float32, L)
        small = warpgroup_mma(m_head, tails.index(step % 2), zero, use_acc=False, is_async=True)
        other = warpgroup_mma(m_tail, heads.index(step % 2), zero, use_acc=False, is_async=True)
        large = warpgroup_mma(m_head, heads.index(step % 2), zero, use_acc=False, is_async=True)
        ahead = step + STAGES
        _ask(md, maps, full, ahead, n, (m_next * HV + h) * 128, STAGES)
        m_next = gl.load(steps + STEP * gl.minimum(ahead + 1, end))
        to_after = gl.load(steps + STEP * gl.minimum(step + 2, end) + TO)
        own_next = gl.load(S + to_next * stride + at)
        s = (step + 1) % STAGES
        mbarrier.wait(full.index(s), ((step + 1) // STAGES) & 1, pred=step < end)
        next_head, next_tail = _split(maps.index(s).permute(TURN).load(A))
        small, other, large, m_head, m_tail = warpgroup_mma_wait(
            0, [small, other, large, m_head, m_tail]
        )
        state = own + (large + (small + other))
        gl.store(S + target * stride + at, state)
        target = to_next
        to_next = to_after
        own = own_next
        m_head = next_head
        m_tail = next_tail


def _program(tables: DeviceTables, chains: Chains, HV: int, adjoint: bool) -> Program:
    return Program(
        fold_kernel,
        len(chains) * HV * (128 // _COLUMNS),
        tables.device,
        tables.fold(chains),
        len(chains),
        HV,
        num_warps=8,
        ADJOINT=adjoint,
        COLUMNS=_COLUMNS,
        STAGES=3,
    )


def _fold(M: Tensor, tables: Tables, chains: Chains, S: Tensor, adjoint: bool) -> None:
    if not chains:
        return
    program = resolved(tables_of(tables), _program, chains, S.shape[1], adjoint)
    program(flat(M, 128, 128), S)


def fold(M: Tensor, tables: Tables, chains: Chains, *, S: Tensor) -> None:
    _fold(M, tables, chains, S, adjoint=False)


def adjoint_fold(M: Tensor, tables: Tables, chains: Chains, *, dS: Tensor) -> None:
    _fold(M, tables, chains, dS, adjoint=True)


VARIANTS = tuple(
    Variant(
        name,
        fold_kernel,
        24,
        {"ADJOINT": adjoint, "COLUMNS": _COLUMNS, "STAGES": 3},
        {"num_warps": 8},
    )
    for name, adjoint in (("fold", False), ("adjoint_fold", True))
)
