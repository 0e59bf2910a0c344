"""A recomputation that sends nothing: what crossed ranks in the first run is given back in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longdelta.ops.handles import handle_of

_active = threading.local()


def _fingerprint(inputs: Sequence[Tensor | None]) -> tuple[object, ...]:
    """Shapes and, on the CPU, a sum of the bits by place, exact; no device is waited for."""
    marks: list[object] = []
    for x in inputs:
        marks.append(None if x is None else tuple(x.shape))
        if x is not None and x.device.type == "cpu":
            bits = x.detach().contiguous().view(_BITS[x.element_size()]).flatten().long()
            marks.append(int((bits * torch.arange(1, len(bits) + 1, device="cpu")).sum()))
    return tuple(marks)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Record:
    """What a first run exchanged, in order; what the operators find behind the handle."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, ...]] = []
        self.marks: list[tuple[object, ...]] = []
        self.cursor = 0

    def once(
        self, compute: Callable[[], tuple[Tensor, ...]], facts: object, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The result of the next exchange of this run; facts, inputs: what it is made from."""
        mark = (facts, *_fingerprint(inputs))
        if self.cursor == len(self.kept):
            self.kept.append(tuple(x.detach().clone() for x in compute()))
            self.marks.append(mark)
        elif self.marks[self.cursor] != mark:
            raise RuntimeError(
                "recompute: this call's plan or inputs are not those that the handle was recorded "
                "with; one RecomputeHandle serves one call (or checkpointed function) and its "
                "recomputation. Make a handle for each"
            )
        self.cursor += 1
        return self.kept[self.cursor - 1]


class RecomputeHandle:
    """Keeps what other ranks sent during a forward, for one recomputation of it.

    The states at segment borders, their transitions and the halo of the convolution: what `light`
    saves, not the activations. One handle serves one call (or one checkpointed function) and one
    micro-step. Equation: none; the recomputed values are the first run's, bit for bit.

    Args:
        repeats: how many recomputations it may serve; `longdelta.checkpoint` allows any number.
    Raises:
        RuntimeError: used again for another forward; make a new one, or call ``clear()``. Other
            inputs in the recomputation: seen by their shapes and, on the CPU, by their bits.
    Source: this project, docs/guides/context-parallelism.md.
    """

    def __init__(self, repeats: int | None = 1) -> None:
        self._repeats = repeats
        self._runs = 0
        self._record = Record()
        self.handle = handle_of(self._record)

    def __reduce__(self) -> Any:
        raise TypeError("a RecomputeHandle belongs to its call: it cannot be copied or pickled")

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return sum(x.numel() * x.element_size() for kept in self._record.kept for x in kept)

    def clear(self) -> None:
        """Forget everything: the next use records anew."""
        self._runs = 0
        self._record.kept.clear()
        self._record.marks.clear()

    def begin(self) -> None:
        """A run starts: the first one records, later ones are given what it recorded."""
        if self._repeats is not None and self._runs > self._repeats:
            raise RuntimeError(
                "recompute: this RecomputeHandle has served its forward and its recomputation; "
                "make a new one for the next forward, or call clear()"
            )
        self._runs += 1
        self._record.cursor = 0

    def once(
        self, compute: Callable[[], tuple[Tensor, ...]], facts: object, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        """As `Record.once`."""
        return self._record.once(compute, facts, *inputs)

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
