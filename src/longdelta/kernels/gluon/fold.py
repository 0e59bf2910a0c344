"""fold: states at borders from summaries, strictly in document order, in fp32.

    S[leave] <- S[leave] + M S[enter]           adjoint: dS[enter] <- dS[enter] + M^T dS[leave]
One program folds COLUMNS value columns of one (chain, value head), segment after segment; the next
M is on its way while one is applied. Both operands are split into bf16 heads and tails, three
products with fp32 sums.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longdelta.kernels.gluon.tables import tables_of
from longdelta.kernels.gluon.tiles import split_product
from longdelta.kernels.stages import Chains, Tables
from longdelta.runtime.launch import launch


@gluon.jit(do_not_specialize=["chains", "HV"])
def fold_kernel(M, S, table, chains, HV, ADJOINT: gl.constexpr, COLUMNS: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    BLOCKS: gl.constexpr = 128 // COLUMNS
    plain: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 4, [1, 0])
    block = gl.program_id(0) % BLOCKS
    h = (gl.program_id(0) // BLOCKS) % HV
    chain = gl.program_id(0) // (BLOCKS * HV)
    first = gl.load(table + chain)
    n = gl.load(table + chain + 1) - first
    steps = table + chains + 1 + first * 3
    i = gl.arange(0, 128, layout=gl.SliceLayout(1, A))[:, None]
    j = gl.arange(0, 128, layout=gl.SliceLayout(0, A))[None, :]
    m_at = j * 128 + i if ADJOINT else i * 128 + j
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    s_at = r * 128 + c + block * COLUMNS
    now = gl.allocate_shared_memory(gl.float32, [128, COLUMNS], plain)
    at = n - 1 if ADJOINT else 0
    source = gl.load(steps + at * 3 + (2 if ADJOINT else 1))
    state = gl.load(S + (source * HV + h).to(gl.int64) * 16384 + s_at)
    m = gl.load(M + (gl.load(steps + at * 3) * HV + h).to(gl.int64) * 16384 + m_at)
    for step in range(n):
        at = n - 1 - step if ADJOINT else step
        following = gl.maximum(at - 1, 0) if ADJOINT else gl.minimum(at + 1, n - 1)
        target = gl.load(steps + at * 3 + (1 if ADJOINT else 2))
        p = S + (target * HV + h).to(gl.int64) * 16384 + s_at
        ahead = gl.load(M + (gl.load(steps + following * 3) * HV + h).to(gl.int64) * 16384 + m_at)
        own = gl.load(p)
        now.store(state)
        gl.thread_barrier()
        state = own + split_product(m, now.load(B), gl.zeros([128, COLUMNS], gl.float32, L))
        gl.store(p, state)
        gl.thread_barrier()
        m = ahead


_COLUMNS = 16


def _fold(M: Tensor, tables: Tables, chains: Chains, S: Tensor, adjoint: bool) -> None:
    table, count = tables_of(tables).fold(chains)
    HV = S.shape[1]
    programs = count * HV * (128 // _COLUMNS)
    launch(
        fold_kernel,
        programs,
        S,
        M,
        S,
        table,
        count,
        HV,
        num_warps=8,
        ADJOINT=adjoint,
        COLUMNS=_COLUMNS,
    )


def fold(M: Tensor, tables: Tables, chains: Chains, *, S: Tensor) -> None:
    _fold(M, tables, chains, S, adjoint=False)


def adjoint_fold(M: Tensor, tables: Tables, chains: Chains, *, dS: Tensor) -> None:
    _fold(M, tables, chains, dS, adjoint=True)
