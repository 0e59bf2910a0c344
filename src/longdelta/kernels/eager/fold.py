"""fold: states at borders from summaries, strictly in document order, in the compute dtype.

    S[leave] <- S[leave] + M S[enter]           adjoint: dS[enter] <- dS[enter] + M^T dS[leave]
Chains (documents) are independent and folded side by side, one segment of each at a step.
Every M is used: `M_bound`, by which a backend may leave one out, is not needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longdelta.kernels.stages import Chains, Tables


def fold(M: Tensor, M_bound: Tensor, tables: Tables, chains: Chains, *, S: Tensor) -> None:
    for maps, enter, leave in tables.fold_steps(chains):
        moved = torch.bmm(M[maps].flatten(0, 1), S[enter].flatten(0, 1))
        S[leave] = S[leave] + moved.view(len(maps), *S.shape[1:])


def adjoint_fold(M: Tensor, M_bound: Tensor, tables: Tables, chains: Chains, *, dS: Tensor) -> None:
    for maps, enter, leave in reversed(tables.fold_steps(chains)):
        moved = torch.bmm(M[maps].flatten(0, 1).transpose(1, 2), dS[leave].flatten(0, 1))
        dS[enter] = dS[enter] + moved.view(len(maps), *dS.shape[1:])
