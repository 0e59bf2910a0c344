"""The rows before each fragment that a short convolution reads, from whichever ranks hold them.

They arrive as the convolution's initial state: [fragments, D, W - 1], zeros (or the document's own
initial state) where the document has no earlier token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longdelta.distributed import collectives
from longdelta.distributed.context import CPContext
from longdelta.distributed.linear import linear
from longdelta.errors import NotYet
from longdelta.ops.recompute import RecomputeHandle, active
from longdelta.plan.halo import HaloMessage


def _rows(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """By integers, so that no index goes to the device."""
    return torch.stack([x[row] for row in rows])


@dataclass(frozen=True)
class _Route:
    context: CPContext
    messages: tuple[HaloMessage, ...]
    rows: int
    """Of this rank's halo buffer."""

    def exchange(self, x: Tensor, adjoint: bool) -> Tensor:
        """Forward: buffer[places] = x[rows]. Adjoint: dx[rows] += d_buffer[places], by message."""
        rank, group = self.context.rank, self.context.group
        sends, receives, local, arrivals = [], [], [], []
        for message in self.messages:
            here, there = message.source, message.target
            taken, put = message.rows, message.places
            if adjoint:
                here, there, taken, put = there, here, put, taken
            if here == there == rank:
                local.append((put, _rows(x, taken)))
            elif here == rank:
                sends.append((there, _rows(x, taken)))
            elif there == rank:
                part = x.new_empty(len(put), *x.shape[1:])
                receives.append((here, part))
                arrivals.append((put, part))
        if group is not None and any(each.source != each.target for each in self.messages):
            collectives.exchange("halo", sends, receives, group, self.context.tag + 3)
        result = x.new_zeros(self.context.rows if adjoint else self.rows, *x.shape[1:])
        for put, part in local + arrivals:
            for row, place in enumerate(put):
                result[place] += part[row]
        return result


def _received(x: Tensor, route: _Route, recompute: RecomputeHandle | None) -> Tensor:
    """The halo buffer [rows, D], with its adjoint."""

    def there(rows: Tensor) -> Tensor:
        if recompute is None:
            return route.exchange(rows, adjoint=False)
        facts = (route.context.tag, hash(route.messages))
        kept = recompute.once(lambda: (route.exchange(rows, adjoint=False),), facts, rows)
        return kept[0].clone()

    def back(gradient: Tensor) -> Tensor:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return route.exchange(gradient.to(wide), adjoint=True).to(gradient.dtype)

    return linear(x, there, back)


def fragment_history(
    x: Tensor, kernel_size: int, initial_state: Tensor | None, context: CPContext
) -> Tensor:
    """x [rows, D] -> [fragments, D, W - 1]: the tokens before each fragment, oldest first.

    initial_state [starts, D, W - 1]: those before each document that starts on this rank.
    """
    context.check_alive()
    halo = context.halo(kernel_size)
    bounds = halo.bounds[context.rank]
    _check_state(initial_state, kernel_size, context)
    received = _received(x, _Route(context, halo.messages, bounds[-1]), active())
    zeros = x.new_zeros(1, x.shape[1], kernel_size - 1)
    dtype = x.dtype if initial_state is None else torch.promote_types(x.dtype, initial_state.dtype)
    # Row 0 for a fragment whose document starts elsewhere; a state without rows has a gradient too.
    states = (
        zeros if initial_state is None else torch.cat([zeros.to(dtype), initial_state.to(dtype)])
    )
    histories, started = [states[:0]], 0
    for index, fragment in enumerate(context.partition.fragments[context.rank]):
        rows = received[bounds[index] : bounds[index + 1]].T.to(dtype)
        started += fragment.offset == 0
        own = started if fragment.offset == 0 and initial_state is not None else 0
        history = torch.cat([states[own, :, rows.shape[1] :], rows], dim=1)
        histories.append(history.unsqueeze(0))
    return torch.cat(histories)


def _check_state(initial_state: Tensor | None, kernel_size: int, context: CPContext) -> None:
    """A document's own state is not sent, so its first W - 1 tokens must lie on one rank."""
    if initial_state is None:
        return
    for pieces in context.partition.fragments:
        for piece in pieces:
            if 0 < piece.offset < kernel_size - 1:
                raise NotYet(
                    f"initial_state: document {piece.document} is cut at its token {piece.offset}, "
                    f"within the first {kernel_size - 1} that the state reaches; cut it later, or "
                    'use align="segment"'
                )


def document_ends(state: Tensor, context: CPContext) -> Tensor:
    """Rows of a per-fragment state [fragments, ...] whose documents end on this rank."""
    pieces = context.partition.fragments[context.rank]
    ends = [
        index
        for index, piece in enumerate(pieces)
        if piece.stop == context.partition.document_tokens(piece.document)
    ]
    return torch.stack([state[index] for index in ends]) if ends else state[:0]
