"""How states cross ranks: the relay, or one all-gather of summaries. Both are a `Boundary`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longdelta.distributed import collectives
from longdelta.distributed.collectives import Group
from longdelta.kernels.stages import Backend, Tables
from longdelta.plan.relay import Chains, Export, Gather, Parcel, Relay

Fold = Callable[[Chains, Tensor], None]
"""Folds chains into a buffer of states at borders, forward or adjoint."""


def _folds(backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables) -> tuple[Fold, Fold]:
    def forward(chains: Chains, S: Tensor) -> None:
        backend.fold(M, M_bound, tables, chains, S=S)

    def adjoint(chains: Chains, dS: Tensor) -> None:
        backend.adjoint_fold(M, M_bound, tables, chains, dS=dS)

    return forward, adjoint


@dataclass(frozen=True)
class RelayBoundary:
    """The running state goes from owner to next owner in document order: one device's operations.

    Deterministic; W - 1 rounds for contiguous layouts, up to 2 W - 2 for zigzag.
    """

    group: Group
    tag: int
    ahead: Relay
    back: Relay

    def enter(
        self, backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables, *, S_border: Tensor
    ) -> None:
        """S_ext at each border becomes the state that crosses it."""
        self._run(self.ahead, _folds(backend, M, M_bound, tables)[0], S_border, self.tag)

    def leave(
        self, backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables, *, dS_border: Tensor
    ) -> None:
        """dS_ext at each border becomes the cotangent that crosses it backwards."""
        self._run(self.back, _folds(backend, M, M_bound, tables)[1], dS_border, self.tag + 1)

    def _run(self, relay: Relay, fold: Fold, state: Tensor, tag: int) -> None:
        fold(relay.chains, state)
        for each in relay.rounds:
            sends = [(parcel.peer, _taken(state, parcel)) for parcel in each.sends]
            receives = [
                (parcel.peer, state.new_empty(len(parcel.borders), *state.shape[1:]))
                for parcel in each.receives
            ]
            collectives.exchange("relay", sends, receives, self.group, tag)
            for parcel, (_, came) in zip(each.receives, receives, strict=True):
                for place, border in enumerate(parcel.borders):
                    state[border] = came[place]
            fold(each.chains, state)


def _taken(state: Tensor, parcel: Parcel) -> Tensor:
    return torch.stack([state[border] for border in parcel.borders])


@dataclass(frozen=True)
class GatherBoundary:
    """Every rank publishes (S_ext, M) of its fragments and folds its predecessors: one step.

    For `deterministic=False`: a composed map rounds differently from a relayed state.
    """

    group: Group
    ahead: Gather
    back: Gather

    def enter(
        self, backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables, *, S_border: Tensor
    ) -> None:
        """S_ext at each border becomes the state that crosses it."""
        fold = _folds(backend, M, M_bound, tables)[0]
        self._run(self.ahead, fold, tables.walk.chains, S_border, adjoint=False)

    def leave(
        self, backend: Backend, M: Tensor, M_bound: Tensor, tables: Tables, *, dS_border: Tensor
    ) -> None:
        """dS_ext at each border becomes the cotangent that crosses it backwards."""
        fold = _folds(backend, M, M_bound, tables)[1]
        self._run(self.back, fold, tables.walk.chains, dS_border, adjoint=True)

    def _run(
        self, plan: Gather, fold: Fold, chains: Chains, state: Tensor, *, adjoint: bool
    ) -> None:
        HV, K, V = state.shape[1:]
        mine = state.new_zeros(plan.slot_count, HV, K, V + K)
        for slot, export in enumerate(plan.exports):
            S_ext, transition = _composed(export, fold, state)
            mine[slot, :, :, :V] = S_ext
            mine[slot, :, :, V:] = transition
        parts = collectives.all_gather("summaries", mine, self.group)
        for each in plan.imports:
            entering = state.new_zeros(HV, K, V)
            for rank, slot in each.predecessors:
                S_ext, transition = parts[rank, slot].split([V, K], dim=-1)
                entering = torch.bmm(transition, entering) + S_ext
            state[each.border] = entering
        fold(chains, state)


def _composed(export: Export, fold: Fold, state: Tensor) -> tuple[Tensor, Tensor]:
    """(S_ext, M) of a whole fragment; the document's first one (backward: last) has no M to read.

    The same fold serves both: from a zero state it gives S_ext, and the transitions alone, from the
    identity, give M.
    """
    HV, K, _ = state.shape[1:]
    nothing = state.new_zeros(HV, K, K)
    if export.enter < 0:
        trial = state.clone()
        fold(export.chains, trial)
        return trial[export.border], nothing
    trial = state.clone()
    trial[export.enter] = 0
    fold(export.chains, trial)
    maps = state.new_zeros(state.shape[0], HV, K, K)
    maps[export.enter] = torch.eye(K, dtype=state.dtype, device=state.device)
    fold(export.chains, maps)
    return trial[export.border], maps[export.border]
