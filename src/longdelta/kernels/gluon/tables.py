"""The tables of a plan as the kernels read them: int32 on the device, made once per plan.

chunks [chunks, 2]: (row, tokens). Tasks [., 8], longest first, so that the last programs to start
are the short ones: scan's (first chunk, chunks, start, end, enter, leave, ..), summarize's (first
chunk, chunks, start, whether it is M, row of the result, ..), adjoint_summarize's (first chunk,
chunks, end, 0, row of the result, ..). -1 stands for none.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longdelta.kernels.stages import Chains, Tables
from longdelta.runtime.launch import Plan


@dataclass(frozen=True)
class Tasks:
    """Segments that one stage walks."""

    rows: Tensor
    chunks: tuple[int, ...]
    """Of each, the longest first."""

    @property
    def count(self) -> int:
        return len(self.chunks)

    @property
    def longest(self) -> int:
        return max(self.chunks, default=0)


class DeviceTables(Plan):
    """Int32 tables of one plan on one device."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.walk = tables.walk
        self.device = tables.device
        self._folds: dict[Chains, Tensor] = {}

    def _upload(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, width).to(self.device)

    @cached_property
    def chunks(self) -> Tensor:
        walk = self.walk
        return self._upload(list(zip(walk.chunk_row, walk.chunk_length, strict=True)), 2)

    def _tasks(self, rows: Sequence[Sequence[int]]) -> Tasks:
        return Tasks(self._upload(rows, 8), tuple(row[1] for row in rows))

    @cached_property
    def scan(self) -> Tasks:
        segments = sorted(self.walk.segments, key=lambda s: -s.chunks)
        return self._tasks(
            [(s.first_chunk, s.chunks, s.start, s.end, s.enter, s.leave, 0, 0) for s in segments]
        )

    @cached_property
    def summarize(self) -> Tasks:
        """Walks of segments that leave through a border: of S into its row, of M into its own."""
        walks = []
        for s in sorted(self.walk.segments, key=lambda s: -s.chunks):
            if s.leave >= 0:
                walks.append((s.first_chunk, s.chunks, s.start, 0, s.leave, 0, 0, 0))
            if s.map >= 0:
                walks.append((s.first_chunk, s.chunks, -1, 1, s.map, 0, 0, 0))
        return self._tasks(walks)

    @cached_property
    def adjoint_summarize(self) -> Tasks:
        """Walks of segments that entered through a border, from their end or from zero."""
        entered = [s for s in self.walk.segments if s.enter >= 0]
        entered.sort(key=lambda s: -s.chunks)
        return self._tasks([(s.first_chunk, s.chunks, s.end, 0, s.enter, 0, 0, 0) for s in entered])

    def fold(self, chains: Chains) -> Tensor:
        """Where each chain's steps start and the last end, then (map, enter, leave) of each."""
        if chains not in self._folds:
            starts, steps = [0], []
            for chain in chains:
                steps += [self.walk.segments[index] for index in chain]
                starts.append(len(steps))
            flat = starts + [x for s in steps for x in (s.map, s.enter, s.leave)]
            self._folds[chains] = self._upload([flat], len(flat))
        return self._folds[chains]


_made: weakref.WeakKeyDictionary[Tables, DeviceTables] = weakref.WeakKeyDictionary()


def tables_of(tables: Tables) -> DeviceTables:
    """The int32 tables that belong to a plan's `Tables`."""
    made = _made.get(tables)
    if made is None:
        made = _made[tables] = DeviceTables(tables)
    return made
