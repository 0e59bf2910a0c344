"""prepare: the gate's sum inside each chunk, and the chunk's unit inverse in the Z form.

    G_i = sum_{j <= i} max(g_j, -87)       N = tril(K K^T, -1), shared by a q/k head's value heads
    (I + D N)^-1 = I + D Z, D = diag(beta)
    bound = sum_i max(g_i, -87) + ln max(1, |1 - beta_i |k_i|^2|)
Z has no factor beta_i or beta_j, and |Z| <= 1 for |k| <= 1, beta <= 2.

By block merges from 1 x 1 up: two neighbouring w x w inverses and the link N_w between them give
    Z_21 = -(I + Z_22 D_2) N_21 (I + D_1 Z_11)
which multiplies true inverses only. (A product of powers of N cancels catastrophically for
correlated keys.) The sum of g is a doubling scan: the same order of additions on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longdelta.kernels.eager.chunked import chunk_blocks, gather, repeat_heads
from longdelta.kernels.stages import GATE_FLOOR, Tables
from longdelta.plan.chunks import CHUNK


def cumulative(g: Tensor) -> Tensor:
    """Inclusive sum over the last axis."""
    total, reach = g, 1
    while reach < g.shape[-1]:
        total = torch.cat([total[..., :reach], total[..., reach:] + total[..., :-reach]], dim=-1)
        reach *= 2
    return total


def unit_inverse(N: Tensor, beta: Tensor) -> Tensor:
    """Z [n, C, C] with (I + D N)^-1 = I + D Z, for N [n, C, C] strictly lower and beta [n, C]."""
    n, C, _ = N.shape
    Z = torch.zeros_like(N)
    width = 1
    while width < C:
        blocks = C // (2 * width)
        shape = (n, blocks, 2 * width, blocks, 2 * width)
        links = N.view(shape).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        merged = Z.view(shape).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        factor = beta.view(n, blocks, 2 * width, 1)

        def part(x: Tensor, rows: slice, columns: slice, width: int = width) -> Tensor:
            return x[:, :, rows, columns].reshape(-1, width, width).contiguous()

        left, right = slice(0, width), slice(width, 2 * width)
        link = part(links, right, left)
        link = link + torch.bmm(
            link, factor[:, :, left].reshape(-1, width, 1) * part(merged, left, left)
        )
        link = link + torch.bmm(
            part(merged, right, right), factor[:, :, right].reshape(-1, width, 1) * link
        )
        merged[:, :, right, left] = -link.view(n, blocks, width, width)
        width *= 2
    return Z


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
    HV, H = g.shape[1], k.shape[1]
    dtype = G.dtype
    for first, last in chunk_blocks(tables, HV * CHUNK * CHUNK):
        chunks = torch.arange(first, last, device=k.device)
        G[first:last] = cumulative(gather(g, tables, chunks, dtype).clamp_min(GATE_FLOOR))
        keys = gather(k, tables, chunks, dtype).flatten(0, 1)
        products = torch.bmm(keys, keys.transpose(1, 2)).view(-1, H, CHUNK, CHUNK)
        products = repeat_heads(products, HV)
        b = gather(beta, tables, chunks, dtype).flatten(0, 1)
        Z[first:last] = unit_inverse(products.tril(-1), b).view(-1, HV, CHUNK, CHUNK)
        stretch = (1 - b * products.diagonal(dim1=1, dim2=2)).abs().clamp_min(1) - 1
        bound[first:last] = G[first:last, :, -1] + torch.log1p(stretch).sum(-1).view(-1, HV)
