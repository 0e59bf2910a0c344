"""A recomputation that sends nothing: what crossed ranks in the first run is given back in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from longdelta.ops.handles import handle_of

_active = threading.local()


class RecomputeHandle:
    """Keeps what other ranks sent during a forward, for one recomputation of it.

    The states at segment borders, their transitions and the halo of the convolution: what `light`
    saves, not the activations. One handle serves one call (or one checkpointed function) and one
    micro-step. Equation: none; the recomputed values are the first run's, bit for bit.

    Args:
        repeats: how many recomputations it may serve; `longdelta.checkpoint` allows any number.
    Raises:
        RuntimeError: used again for another forward; make a new one, or call ``clear()``.
    Source: this project, docs/guides/context-parallelism.md.
    """

    def __init__(self, repeats: int | None = 1) -> None:
        self._repeats = repeats
        self._kept: list[tuple[Tensor, ...]] = []
        self._runs = 0
        self._cursor = 0
        self.handle = handle_of(self)

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return sum(x.numel() * x.element_size() for kept in self._kept for x in kept)

    def clear(self) -> None:
        """Forget everything: the next use records anew."""
        self._kept, self._runs, self._cursor = [], 0, 0

    def begin(self) -> None:
        """A run starts: the first one records, later ones are given what it recorded."""
        if self._repeats is not None and self._runs > self._repeats:
            raise RuntimeError(
                "recompute: this RecomputeHandle has served its forward and its recomputation; "
                "make a new one for the next forward, or call clear()"
            )
        self._runs += 1
        self._cursor = 0

    def once(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The result of the next exchange of this run."""
        if self._cursor == len(self._kept):
            self._kept.append(tuple(x.detach().clone() for x in compute()))
        self._cursor += 1
        return self._kept[self._cursor - 1]

    def run(self, fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """fn(*args) with every exchange inside it recorded here, or taken from here."""
        self.begin()
        before = active()
        _active.handle = self
        try:
            return fn(*args, **keywords)
        finally:
            _active.handle = before


def active() -> RecomputeHandle | None:
    """The handle of the checkpointed function that runs on this thread."""
    return getattr(_active, "handle", None)
