"""The chunked form, stage by stage: one document, one value head, lists of chunks.

A document is cut into chunks of 64 tokens (the last may be shorter) and into segments of a given
number of chunks. A *border* is where two segments meet. Symbols of one chunk, row vectors, S the
state at its start and S+ at its end:

    G_i = g_1 + ... + g_i, every g floored at -87        D = diag(beta)        s = scale
    E = diag(e^{G_i})        r = diag(e^{G_C - G_i})        gamma = e^{G_C}
    Gam_ij = e^{G_i - G_j} for i >= j, else 0
    T0 = (I + D tril(K K^T, -1))^{-1} = I + D Z,        Z strictly lower
    W = V - E K S        U = D Uh        Uh = (I + Gam*Z D) W
    S+ = gamma S + K^T r U        O = s (E Q S + (Gam * Q K^T) U)

The stages:

    prepare            k, g, beta           -> G, Z, bound         of every chunk
    summarize          a segment            -> S_ext, M            S_out = M S_in + S_ext
    fold               S, maps              -> the state at every border
    scan               a segment, S_in      -> o, S_out, tapes S, Uh
    adjoint_summarize  a segment, dS_out    -> dS_ext              dS_in = M^T dS_out + dS_ext
    adjoint_scan       a segment, dS_out    -> dS_in, tapes dS, dR
    gradients          the tapes            -> dq, dk, dv, dg, dbeta

All tensors are float64. A tape holds one item per chunk.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longdelta.reference.affine import AffineMap, apply, transpose
from longdelta.reference.recurrence import Gradients, RecurrenceResult

CHUNK = 64
FLOOR = -87.0  # e^-87 is the last decay above the smallest normal float32; below it dg is 0

Chunks = Sequence[Tensor]


class Prepared(NamedTuple):
    """G: ``[C]``, sums of the floored gate; Z: ``[C, C]``, strictly lower; bound: ``[]``, the log
    of the most by which a state's norm can grow; one of each a chunk."""

    G: list[Tensor]
    Z: list[Tensor]
    bound: list[Tensor]


class ScanTape(NamedTuple):
    """S: ``[K, V]``, the state at the chunk's start; Uh: ``[C, V]``, the corrections over beta."""

    S: list[Tensor]
    Uh: list[Tensor]


class ScanResult(NamedTuple):
    """o: ``[C, V]`` a chunk; S_out: ``[K, V]``, the state that leaves the segment; the tape."""

    o: list[Tensor]
    S_out: Tensor
    tape: ScanTape


class AdjointTape(NamedTuple):
    """dS: ``[K, V]``, the cotangent of the state at the chunk's end; dR: ``[C, V]``."""

    dS: list[Tensor]
    dR: list[Tensor]


class AdjointScanResult(NamedTuple):
    """dS_in: ``[K, V]``, the cotangent of the state that entered the segment; the tape."""

    dS_in: Tensor
    tape: AdjointTape


class ChunkGradients(NamedTuple):
    """dq, dk: ``[C, K]``; dv: ``[C, V]``; dg, dbeta: ``[C]``; one of each a chunk."""

    dq: list[Tensor]
    dk: list[Tensor]
    dv: list[Tensor]
    dg: list[Tensor]
    dbeta: list[Tensor]


def prepare(k: Chunks, g: Chunks, beta: Chunks) -> Prepared:
    """What a chunk needs that no state enters: the gate sums, the triangular inverse, the bound.

        G_i = sum_{j<=i} max(g_j, -87)
        T0 = I + D Z,  so  (I + D N)(I + D Z) = I  with N = tril(K K^T, -1), so  Z = -N (I + D Z)

    Row i of the last equation needs the rows above it only: forward substitution, no division.

        bound = sum_i max(g_i, -87) + ln max(1, |1 - beta_i |k_i|^2|)

    since a token's (I - beta k^T k) e^g has the eigenvalues e^g and (1 - beta |k|^2) e^g.

    Args:
        k: ``[C, K]`` a chunk.
        g, beta: ``[C]`` a chunk.

    Returns:
        ``Prepared(G, Z, bound)``.

    Source: arXiv:2412.06464; the Z form is derived in docs/math.md.
    """
    return Prepared(
        [_gate_sums(g_c) for g_c in g],
        [_inverse(k_c, beta_c) for k_c, beta_c in zip(k, beta, strict=True)],
        [_bound(*chunk) for chunk in zip(k, g, beta, strict=True)],
    )


def summarize(k: Chunks, v: Chunks, G: Chunks, Z: Chunks, beta: Chunks, S_in: Tensor) -> AffineMap:
    """The map by which a state crosses a segment, without its outputs.

        X = D (I + Z^T D) K
        S+ = gamma S - X^T (gamma K S - r V)        from S_in through every chunk: S_ext
        M  = prod_c gamma_c (I - X_c^T K_c)         later chunks on the left

    Args:
        k, v, G, Z, beta: the segment's chunks.
        S_in: ``[K, V]``, where the walk starts: zero in a middle segment; the initial state in the
            first one, whose S_ext then is the state itself and whose M nobody needs.

    Returns:
        ``AffineMap(M, S_ext)``.

    Source: docs/math.md.
    """
    S, M = S_in, torch.eye(S_in.shape[0], dtype=S_in.dtype)
    for k_c, v_c, G_c, Z_c, beta_c in zip(k, v, G, Z, beta, strict=True):
        _, r, gamma, _ = _decays(G_c)
        D = beta_c[:, None]
        X = D * (k_c + Z_c.T @ (D * k_c))
        S = gamma * S - X.T @ (gamma * (k_c @ S) - r * v_c)
        M = gamma * (M - X.T @ (k_c @ M))
    return AffineMap(M, S)


def fold(S: Tensor, maps: Sequence[AffineMap]) -> list[Tensor]:
    """Send a state through segments, strictly from left to right.

        S_next = M S + S_ext

    The backward folds its cotangents by the same rule, from the last segment to the first, with the
    maps ``(M^T, dS_ext)``.

    Args:
        S: ``[K, V]``, the state at the first border.
        maps: ``(M, S_ext)`` of each segment between two borders.

    Returns:
        The states at all borders: ``len(maps) + 1`` of them, S the first.

    Source: docs/math.md.
    """
    states = [S]
    for step in maps:
        states.append(apply(step, states[-1]))
    return states


def scan(
    q: Chunks,
    k: Chunks,
    v: Chunks,
    G: Chunks,
    Z: Chunks,
    beta: Chunks,
    S_in: Tensor,
    *,
    scale: float,
) -> ScanResult:
    """State and output of a segment, one chunk after another.

        W = V - E K S        Uh = (I + Gam*Z D) W        U = D Uh
        O = s (E Q S + (Gam * Q K^T) U)        S+ = gamma S + K^T r U

    Args:
        q, k, v, G, Z, beta: the segment's chunks.
        S_in: ``[K, V]``, the state that enters.
        scale: s.

    Returns:
        ``ScanResult(o, S_out, tape)``; the tape is what ``gradients`` reads.

    Source: arXiv:2412.06464; docs/math.md.
    """
    o, tape, S = [], ScanTape([], []), S_in
    for q_c, k_c, v_c, G_c, Z_c, beta_c in zip(q, k, v, G, Z, beta, strict=True):
        E, r, gamma, Gam = _decays(G_c)
        D = beta_c[:, None]
        W = v_c - E * (k_c @ S)
        Uh = W + (Gam * Z_c) @ (D * W)
        U = D * Uh
        o.append(scale * (E * (q_c @ S) + (Gam * (q_c @ k_c.T)) @ U))
        tape.S.append(S)
        tape.Uh.append(Uh)
        S = gamma * S + k_c.T @ (r * U)
    return ScanResult(o, S, tape)


def adjoint_summarize(
    q: Chunks,
    k: Chunks,
    G: Chunks,
    Z: Chunks,
    beta: Chunks,
    do: Chunks,
    dS_out: Tensor,
    *,
    scale: float,
) -> Tensor:
    """What a segment's outputs send to the state that enters it, walked backwards.

        X' = D (I + Z D) K        R_g = s E (Q - tril(Q K^T) X')
        dS = gamma (dS+ - X'^T K dS+) + R_g^T dO

    M needs no second walk: dS_in = M^T dS_out + dS_ext, with the M of ``summarize``.

    Args:
        q, k, G, Z, beta: the segment's chunks.
        do: ``[C, V]`` a chunk, cotangent of o.
        dS_out: ``[K, V]``, where the walk starts: zero in a middle segment; the cotangent of the
            final state in the last one.
        scale: s.

    Returns:
        dS_ext ``[K, V]``.

    Source: docs/math.md.
    """
    dS = dS_out
    chunks = list(zip(q, k, G, Z, beta, do, strict=True))
    for q_c, k_c, G_c, Z_c, beta_c, do_c in reversed(chunks):
        E, _, gamma, _ = _decays(G_c)
        D = beta_c[:, None]
        X = D * (k_c + Z_c @ (D * k_c))
        R = scale * E * (q_c - (q_c @ k_c.T).tril() @ X)
        dS = gamma * (dS - X.T @ (k_c @ dS)) + R.T @ do_c
    return dS


def adjoint_scan(
    q: Chunks,
    k: Chunks,
    G: Chunks,
    Z: Chunks,
    beta: Chunks,
    do: Chunks,
    dS_out: Tensor,
    *,
    scale: float,
) -> AdjointScanResult:
    """Cotangents of the state and of the corrections, from the last chunk to the first.

        dU = s (Gam * Q K^T)^T dO + r K dS+        dR = (I + Gam D Z)^T dU        dW = D dR
        dS = gamma dS+ + s (E Q)^T dO - (E K)^T dW

    Args:
        q, k, G, Z, beta: the segment's chunks.
        do: ``[C, V]`` a chunk, cotangent of o.
        dS_out: ``[K, V]``, cotangent of the state that leaves.
        scale: s.

    Returns:
        ``AdjointScanResult(dS_in, tape)``; the tape, in the order of the chunks, is what
        ``gradients`` reads.

    Source: docs/math.md.
    """
    tape, dS = AdjointTape([], []), dS_out
    chunks = list(zip(q, k, G, Z, beta, do, strict=True))
    for q_c, k_c, G_c, Z_c, beta_c, do_c in reversed(chunks):
        E, r, gamma, Gam = _decays(G_c)
        D = beta_c[:, None]
        dU = scale * (Gam * (q_c @ k_c.T)).T @ do_c + r * (k_c @ dS)
        dR = dU + (Gam * D * Z_c).T @ dU
        tape.dS.insert(0, dS)
        tape.dR.insert(0, dR)
        dS = gamma * dS + scale * (E * q_c).T @ do_c - (E * k_c).T @ (D * dR)
    return AdjointScanResult(dS, tape)


def gradients(
    q: Chunks,
    k: Chunks,
    g: Chunks,
    beta: Chunks,
    do: Chunks,
    tape: ScanTape,
    adjoint_tape: AdjointTape,
    *,
    scale: float,
) -> ChunkGradients:
    """Gradients of a segment's inputs from the two tapes; every chunk on its own.

        U = D Uh        dW = D dR = dV        dbeta_i = <dR_i, Uh_i>
        A = s Gam*(dO U^T)                    tril, diagonal included
        Y = -tril_strict(Gam*(dW U^T))        adjoint of the triangular solve
        dQ = s E dO S^T + A K
        c1 = r U dS+^T        colK = c1 + A^T Q + Y^T K        rowK = -E dW S^T + Y K
        dK = colK + rowK
        dG_i = <dQ_i, Q_i> + <rowK_i, K_i> - <colK_i, K_i>
        dG_C += sum_j <c1_j, K_j> + gamma <dS+, S>
        dg_t = sum_{i>=t} dG_i, and 0 where g_t <= -87

    Args:
        q, k, g, beta, do: the segment's chunks.
        tape: S and Uh of ``scan``.
        adjoint_tape: dS+ and dR of ``adjoint_scan``.
        scale: s.

    Returns:
        ``ChunkGradients``.

    Source: docs/math.md.
    """
    out = ChunkGradients([], [], [], [], [])
    for q_c, k_c, g_c, beta_c, do_c, S, Uh, dS, dR in zip(
        q, k, g, beta, do, *tape, *adjoint_tape, strict=True
    ):
        E, r, gamma, Gam = _decays(_gate_sums(g_c))
        D = beta_c[:, None]
        U, dW = D * Uh, D * dR
        A = scale * Gam * (do_c @ U.T)
        Y = -(Gam * (dW @ U.T)).tril(-1)
        dQ = scale * E * (do_c @ S.T) + A @ k_c
        c1 = r * (U @ dS.T)
        colK = c1 + A.T @ q_c + Y.T @ k_c
        rowK = -E * (dW @ S.T) + Y @ k_c
        dG = _rowdot(dQ, q_c) + _rowdot(rowK, k_c) - _rowdot(colK, k_c)
        dG[-1] += _rowdot(c1, k_c).sum() + gamma * (dS * S).sum()
        dg = dG.flip(0).cumsum(0).flip(0)
        out.dq.append(dQ)
        out.dk.append(colK + rowK)
        out.dv.append(dW)
        out.dg.append(torch.where(g_c > FLOOR, dg, 0.0))
        out.dbeta.append(_rowdot(dR, Uh))
    return out


@torch.no_grad()
def chunked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    segment_chunks: int | None = None,
) -> RecurrenceResult:
    """The stages of the forward, composed over documents, value heads and segments.

    Args:
        q, k, v, g, beta, scale, initial_state, cu_seqlens: as in ``recurrence``.
        segment_chunks: chunks of a segment; None keeps every document whole.

    Returns:
        ``RecurrenceResult(o, final_state)``: what ``recurrence`` gives, g floored at -87.

    Source: arXiv:2412.06464; docs/math.md.
    """
    N, bounds = _documents(v, cu_seqlens)
    o = torch.zeros_like(v, dtype=torch.float64)
    final_state = _states(initial_state, N, k, v)
    for n, h, h_k, rows in _document_heads(bounds, k, v):
        x = q[rows, h_k], k[rows, h_k], v[rows, h], g[rows, h], beta[rows, h]
        segments = _segments(*x, segment_chunks)
        S_in = final_state[n, h].clone()
        states = _entering_states(S_in, _maps(segments, S_in))
        scans = [
            scan(y.q, y.k, y.v, y.G, y.Z, y.beta, S, scale=scale)
            for y, S in zip(segments, states, strict=True)
        ]
        o[rows, h] = torch.cat([o_c for one in scans for o_c in one.o])
        final_state[n, h] = scans[-1].S_out
    return RecurrenceResult(o, final_state)


@torch.no_grad()
def chunked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    do: Tensor,
    d_final_state: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    segment_chunks: int | None = None,
) -> Gradients:
    """The stages of the backward, composed over documents, value heads and segments.

    Args:
        q, k, v, g, beta, scale, do, d_final_state, initial_state, cu_seqlens: as in
            ``recurrence_gradients``.
        segment_chunks: chunks of a segment; None keeps every document whole.

    Returns:
        ``Gradients``: what ``recurrence_gradients`` gives, g floored at -87.

    Source: docs/math.md.
    """
    N, bounds = _documents(v, cu_seqlens)
    dq, dk, dv, dg, dbeta = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v, g, beta))
    S0 = _states(initial_state, N, k, v)
    d_state = _states(d_final_state, N, k, v)
    for n, h, h_k, rows in _document_heads(bounds, k, v):
        x = q[rows, h_k], k[rows, h_k], v[rows, h], g[rows, h], beta[rows, h]
        segments = _segments(*x, segment_chunks)
        dos = _cut(do[rows, h], segment_chunks)
        part, dS_in = _document_gradients(segments, dos, S0[n, h], d_state[n, h].clone(), scale)
        dq[rows, h_k] += torch.cat(part.dq)
        dk[rows, h_k] += torch.cat(part.dk)
        dv[rows, h] = torch.cat(part.dv)
        dg[rows, h] = torch.cat(part.dg)
        dbeta[rows, h] = torch.cat(part.dbeta)
        d_state[n, h] = dS_in
    return Gradients(dq, dk, dv, dg, dbeta, d_state)


class _Segment(NamedTuple):
    q: Chunks
    k: Chunks
    v: Chunks
    g: Chunks
    beta: Chunks
    G: Chunks
    Z: Chunks


def _gate_sums(g: Tensor) -> Tensor:
    return g.clamp(min=FLOOR).cumsum(0)


def _inverse(k: Tensor, beta: Tensor) -> Tensor:
    """Z by forward substitution."""
    N = (k @ k.T).tril(-1)
    Z = N.new_zeros(0, N.shape[1])
    for i in range(N.shape[0]):
        Z = torch.cat([Z, -(N[i] + (N[i, :i] * beta[:i]) @ Z)[None]])
    return Z


def _bound(k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    stretch = (1 - beta * (k * k).sum(1)).abs().clamp(min=1)
    return (g.clamp(min=FLOOR) + stretch.log()).sum()


class _Decays(NamedTuple):
    E: Tensor
    r: Tensor
    gamma: Tensor
    Gam: Tensor


def _decays(G: Tensor) -> _Decays:
    """E and r as columns, gamma and Gam; exponents are selected before exp."""
    future = torch.ones(len(G), len(G), dtype=torch.bool).triu(1)
    Gam = (G[:, None] - G[None, :]).masked_fill(future, -torch.inf).exp()
    return _Decays(G.exp()[:, None], (G[-1] - G).exp()[:, None], G[-1].exp(), Gam)


def _rowdot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _maps(segments: Sequence[_Segment], S_in: Tensor) -> list[AffineMap]:
    """The maps of all segments but the last; the first is walked from the initial state."""
    starts = [S_in] + [torch.zeros_like(S_in)] * (len(segments) - 2)
    return [
        summarize(x.k, x.v, x.G, x.Z, x.beta, S)
        for x, S in zip(segments[:-1], starts, strict=False)
    ]


def _entering_states(S_in: Tensor, maps: Sequence[AffineMap]) -> list[Tensor]:
    """The state that enters each segment."""
    return [S_in, *(fold(maps[0].B, maps[1:]) if maps else [])]


def _leaving_cotangents(
    segments: Sequence[_Segment],
    dos: Sequence[Chunks],
    maps: Sequence[AffineMap],
    dS_out: Tensor,
    scale: float,
) -> list[Tensor]:
    """The cotangent of the state that leaves each segment; the mirror of the entering states."""
    if not maps:
        return [dS_out]
    starts = [torch.zeros_like(dS_out)] * (len(segments) - 2) + [dS_out]
    dS_ext = [
        adjoint_summarize(x.q, x.k, x.G, x.Z, x.beta, do, dS, scale=scale)
        for x, do, dS in zip(segments[1:], dos[1:], starts, strict=True)
    ]
    middle = [transpose(step, dS) for step, dS in zip(maps[1:], dS_ext[:-1], strict=True)]
    return [*reversed(fold(dS_ext[-1], middle[::-1])), dS_out]


def _document_gradients(
    segments: Sequence[_Segment], dos: Sequence[Chunks], S_in: Tensor, dS_out: Tensor, scale: float
) -> tuple[ChunkGradients, Tensor]:
    """The gradients of every chunk of a document, and the cotangent of its initial state."""
    maps = _maps(segments, S_in)
    states = _entering_states(S_in, maps)
    cotangents = _leaving_cotangents(segments, dos, maps, dS_out, scale)
    walk = list(zip(segments, dos, states, cotangents, strict=True))
    dS_in, out = dS_out, ChunkGradients([], [], [], [], [])
    for x, do, S, dS in reversed(walk):
        tape = scan(x.q, x.k, x.v, x.G, x.Z, x.beta, S, scale=scale).tape
        dS_in, adjoint_tape = adjoint_scan(x.q, x.k, x.G, x.Z, x.beta, do, dS, scale=scale)
        part = gradients(x.q, x.k, x.g, x.beta, do, tape, adjoint_tape, scale=scale)
        for chunks, earlier in zip(out, part, strict=True):
            chunks[:0] = earlier
    return out, dS_in  # of the first segment, the last one walked


def _documents(v: Tensor, cu_seqlens: Sequence[int] | None) -> tuple[int, list[int]]:
    bounds = [0, v.shape[0]] if cu_seqlens is None else list(cu_seqlens)
    return len(bounds) - 1, bounds


def _states(state: Tensor | None, N: int, k: Tensor, v: Tensor) -> Tensor:
    if state is None:
        return torch.zeros(N, v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    return state.double().clone()


def _document_heads(
    bounds: Sequence[int], k: Tensor, v: Tensor
) -> Iterator[tuple[int, int, int, slice]]:
    """Document, value head, its q/k head, and the document's rows; empty documents have none."""
    HV, group = v.shape[1], v.shape[1] // k.shape[1]
    for n, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            yield from ((n, h, h // group, slice(begin, end)) for h in range(HV))


def _cut(x: Tensor, segment_chunks: int | None) -> list[Chunks]:
    """The rows of a document as segments of chunks."""
    chunks = torch.split(x.double(), CHUNK)
    step = segment_chunks or len(chunks)
    return [chunks[i : i + step] for i in range(0, len(chunks), step)]


def _segments(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segment_chunks: int | None
) -> list[_Segment]:
    cuts = (_cut(x, segment_chunks) for x in (q, k, v, g, beta))
    return [
        _Segment(q_x, k_x, v_x, g_x, beta_x, *prepare(k_x, g_x, beta_x)[:2])
        for q_x, k_x, v_x, g_x, beta_x in zip(*cuts, strict=True)
    ]
