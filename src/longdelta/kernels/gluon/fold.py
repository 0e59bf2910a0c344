"""fold: states at borders from summaries, strictly in document order, in fp32.

    S[leave] <- S[leave] + M S[enter]           adjoint: dS[enter] <- dS[enter] + M^T dS[leave]
One program folds a few blocks of COLUMNS value columns of one (chain, value head), segment after
segment: three products of bf16 heads and tails (head head, head tail, tail head) with fp32 sums,
which keep 16 bits of both operands. M comes in fp32 through a ring of STAGES and is split into
registers one step ahead, while the products of the step before run. The state goes through shared
memory, to two places by turns: one barrier a step, behind which every warp is also done with the M
of this step, so that its stage may be filled anew. Rows and states are read a step or two before
they are needed.

What the gates forget is passed by: where M_bound shows that nothing of S[enter] is left, S[leave]
is, bit by bit, what summarize wrote; where a chain has no other segment, no state is read.
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

from longdelta.kernels.gluon.dialect import async_load, barrier, follow
from longdelta.kernels.gluon.tables import DeviceTables, tables_of
from longdelta.kernels.gluon.tiles import flat, to_bf16
from longdelta.kernels.gluon.variants import Variant
from longdelta.kernels.stages import Chains, Tables
from longdelta.plan import chunks as plan
from longdelta.runtime.launch import Program, multiprocessors, resolved

FORGOTTEN = gl.constexpr(plan.FORGOTTEN)
_COLUMNS = 16
_BLOCKS = 128 // _COLUMNS
_PROGRAMS = 3
"""Programs that each multiprocessor has, at least, before one takes more than a block."""


@gluon.jit
def _any_counts(steps, M_bound, n, h, HV):
    """Whether some M of a chain is not forgotten; one of NaN is not. Every warp finds out alone."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([4], [32], [8], [0]))
    counts = 0
    for first in range(0, n, 128):
        row = gl.load(steps + 3 * gl.minimum(first + lane, n - 1))
        x = gl.load(M_bound + row.to(gl.int64) * HV + h)
        counts = gl.maximum(counts, gl.max(gl.where(x <= FORGOTTEN, 0, 1), 0))
    return counts


@gluon.jit
def _ask(md, maps, full, step, at, n, row, STAGES: gl.constexpr):
    """Asks for the M of a step, if there is one."""
    s = at % STAGES
    mbarrier.expect(full.index(s), 65536, pred=step < n)
    async_load(md, [row, 0], full.index(s), maps.index(s), pred=step < n)


@gluon.jit
def _split(x):
    head = to_bf16(x)
    return head, to_bf16(x - head.to(gl.float32))


@gluon.jit(do_not_specialize=["chains", "HV", "PER"])
def fold_kernel(
    md,
    S,
    M_bound,
    table,
    chains,
    HV,
    PER,
    ADJOINT: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    follow()
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
    parts = BLOCKS // PER
    part = gl.program_id(0) % parts
    h = (gl.program_id(0) // parts) % HV
    chain = gl.program_id(0) // (parts * HV)
    first = gl.load(table + chain)
    n = gl.load(table + chain + 1) - first
    end = n - 1
    steps = table + chains + 1 + first * 3
    blocks = PER * _any_counts(steps, M_bound, n, h, HV)
    if ADJOINT:
        steps = steps + end * 3
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    stride = HV.to(gl.int64) * 16384
    done = 0
    for block in range(part * PER, part * PER + blocks):
        at = h.to(gl.int64) * 16384 + r * 128 + c + block * COLUMNS
        for p in gl.static_range(STAGES):
            row = (gl.load(steps + STEP * gl.minimum(p, end)) * HV + h) * 128
            _ask(md, maps, full, p, done + p, n, row, STAGES)
        m_next = gl.load(steps + STEP * gl.minimum(STAGES, end))
        target = gl.load(steps + TO)
        to_next = gl.load(steps + STEP * gl.minimum(1, end) + TO)
        bound = gl.load(M_bound + gl.load(steps).to(gl.int64) * HV + h)
        b_next = gl.load(steps + STEP * gl.minimum(1, end))
        state = gl.load(S + gl.load(steps + FROM) * stride + at)
        own = gl.load(S + target * stride + at)
        mbarrier.wait(full.index(done % STAGES), (done // STAGES) & 1)
        m_head, m_tail = _split(maps.index(done % STAGES).permute(TURN).load(A))
        for step in range(n):
            head, tail = _split(state)
            turn = (done + step) % 2
            heads.index(turn).store(head)
            tails.index(turn).store(tail)
            fence_async_shared()
            barrier()
            zero = gl.zeros([128, COLUMNS], gl.float32, L)
            small = warpgroup_mma(m_head, tails.index(turn), zero, use_acc=False, is_async=True)
            other = warpgroup_mma(m_tail, heads.index(turn), zero, use_acc=False, is_async=True)
            large = warpgroup_mma(m_head, heads.index(turn), zero, use_acc=False, is_async=True)
            ahead = step + STAGES
            _ask(md, maps, full, ahead, done + ahead, n, (m_next * HV + h) * 128, STAGES)
            m_next = gl.load(steps + STEP * gl.minimum(ahead + 1, end))
            to_after = gl.load(steps + STEP * gl.minimum(step + 2, end) + TO)
            own_next = gl.load(S + to_next * stride + at)
            bound_next = gl.load(M_bound + b_next.to(gl.int64) * HV + h)
            b_next = gl.load(steps + STEP * gl.minimum(step + 2, end))
            later = done + step + 1
            s = later % STAGES
            mbarrier.wait(full.index(s), (later // STAGES) & 1, pred=step < end)
            next_head, next_tail = _split(maps.index(s).permute(TURN).load(A))
            small, other, large, m_head, m_tail = warpgroup_mma_wait(
                0, [small, other, large, m_head, m_tail]
            )
            state = gl.where(bound <= FORGOTTEN, own, own + (large + (small + other)))
            gl.store(S + target * stride + at, state)
            target = to_next
            to_next = to_after
            own = own_next
            bound = bound_next
            m_head = next_head
            m_tail = next_tail
        done += n
        # Before the next block is asked for, every warp is done with the last stages of this one.
        barrier()


def _program(tables: DeviceTables, chains: Chains, HV: int, adjoint: bool) -> Program:
    programs, per = len(chains) * HV * _BLOCKS, 1
    while per < _BLOCKS and programs >= 2 * _PROGRAMS * multiprocessors(tables.device):
        programs, per = programs // 2, per * 2
    return Program(
        fold_kernel,
        programs,
        tables.device,
        tables.fold(chains),
        len(chains),
        HV,
        per,
        num_warps=8,
        ADJOINT=adjoint,
        COLUMNS=_COLUMNS,
        STAGES=3,
    )


def _fold(
    M: Tensor, M_bound: Tensor, tables: Tables, chains: Chains, S: Tensor, adjoint: bool
) -> None:
    if not chains:
        return
    program = resolved(tables_of(tables), _program, chains, S.shape[1], adjoint)
    program(flat(M, 128, 128), S, M_bound)


def fold(M: Tensor, M_bound: Tensor, tables: Tables, chains: Chains, *, S: Tensor) -> None:
    _fold(M, M_bound, tables, chains, S, adjoint=False)


def adjoint_fold(M: Tensor, M_bound: Tensor, tables: Tables, chains: Chains, *, dS: Tensor) -> None:
    _fold(M, M_bound, tables, chains, dS, adjoint=True)


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
