"""The stage ABI: what each stage takes, what it writes, and the tables that say where.

Every backend is a module with the functions of `Backend`. Stages trust their input (arguments.py
has validated it), write every element of the tensors named after the `*` and return nothing; ops/
allocates. q, k: [T, H, K], v, o, do: [T, HV, V], g, beta: [T, HV]; states: [rows, HV, K, V] in the
compute dtype; the tensors between stages are described in plan/tensors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from longdelta.plan.chunks import CHUNK, Segment, Walk
from longdelta.plan.tensors import Counts
from longdelta.runtime.recording import Recordings

Chains = tuple[tuple[int, ...], ...]
"""Runs of segment indices, each entering where the one before it left."""


def _on_cpu(numbers: Sequence[object]) -> Tensor:
    """Indices, whatever the default device and mode are; a copy to a device is then complete."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Positions in a list of tasks, and the row that each of them reads or writes elsewhere."""

    positions: Tensor
    rows: Tensor

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device) -> Pairs:
        held = [(position, row) for position, row in enumerate(rows) if row >= 0]
        both = _on_cpu(held).reshape(-1, 2).to(device)
        return cls(both[:, 0].contiguous(), both[:, 1].contiguous())


@dataclass(frozen=True, eq=False)
class Tasks:
    """Segments walked side by side, longest first, so that the active ones are always a prefix."""

    chunks: tuple[int, ...]
    first: Tensor
    last: Tensor
    start: Pairs
    end: Pairs
    enter: Pairs
    leave: Pairs
    map: Pairs

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> Tasks:
        segments = sorted(segments, key=lambda segment: -segment.chunks)
        first = _on_cpu([s.first_chunk for s in segments])
        chunks = _on_cpu([s.chunks for s in segments])
        return cls(
            chunks=tuple(s.chunks for s in segments),
            first=first.to(device),
            last=(first + chunks - 1).to(device),
            start=Pairs.of([s.start for s in segments], device),
            end=Pairs.of([s.end for s in segments], device),
            enter=Pairs.of([s.enter for s in segments], device),
            leave=Pairs.of([s.leave for s in segments], device),
            map=Pairs.of([s.map for s in segments], device),
        )

    def active(self, step: int) -> int:
        """How many tasks have a chunk left at this step."""
        return sum(chunks > step for chunks in self.chunks)


class Tables:
    """A `Walk` on a device: built once per plan and device, shared by every layer and direction."""

    def __init__(self, walk: Walk, device: torch.device) -> None:
        self.walk = walk
        self.device = device
        self._blocks: dict[tuple[str, int], tuple[Tasks, ...]] = {}
        self._folds: dict[Chains, tuple[Tensor, ...]] = {}
        self.recordings = Recordings()

    @cached_property
    def counts(self) -> Counts:
        """Of its chunks, borders and maps."""
        return Counts.of(self.walk)

    @cached_property
    def _chunk(self) -> tuple[Tensor, Tensor]:
        row, length = _on_cpu([self.walk.chunk_row, self.walk.chunk_length]).reshape(2, -1, 1)
        position = torch.arange(CHUNK, device="cpu")
        mask = position < length
        return torch.where(mask, row + position, 0).to(self.device), mask.to(self.device)

    @property
    def chunk_rows(self) -> Tensor:
        """[chunks, C] row of each token of a chunk; 0 where it has none."""
        return self._chunk[0]

    @property
    def chunk_mask(self) -> Tensor:
        """[chunks, C] whether the chunk has this token."""
        return self._chunk[1]

    @cached_property
    def row_slot(self) -> Tensor:
        """[used rows] place of each row among the chunks x C slots."""
        slots = [
            torch.arange(length, device="cpu") + chunk * CHUNK
            for chunk, length in enumerate(self.walk.chunk_length)
        ]
        return (torch.cat(slots) if slots else _on_cpu([])).to(self.device)

    def blocks(self, stage: str, size: int) -> tuple[Tasks, ...]:
        """The segments that a stage walks, in blocks of at most `size`, longest first."""
        if (stage, size) not in self._blocks:
            held = [s for s in self.walk.segments if _WALKED[stage](s)]
            held.sort(key=lambda segment: -segment.chunks)
            self._blocks[stage, size] = tuple(
                Tasks.of(held[i : i + size], self.device) for i in range(0, len(held), size)
            )
        return self._blocks[stage, size]

    def fold_steps(self, chains: Chains) -> tuple[Tensor, ...]:
        """Of each step of a fold, in document order: rows (map, enter, leave) of [3, chains]."""
        if chains not in self._folds:
            steps = []
            for step in range(max(map(len, chains), default=0)):
                held = [self.walk.segments[chain[step]] for chain in chains if len(chain) > step]
                rows = _on_cpu([(s.map, s.enter, s.leave) for s in held]).T
                steps.append(rows.contiguous().to(self.device))
            self._folds[chains] = tuple(steps)
        return self._folds[chains]


_WALKED: dict[str, Callable[[Segment], bool]] = {
    "summarize": lambda segment: segment.leave >= 0,
    "adjoint_summarize": lambda segment: segment.enter >= 0,
    "scan": lambda segment: True,
}
"""Which segments a stage walks."""


GATE_FLOOR = -87.0
"""e^-87 is just above the smallest normal float32; a deeper floor costs later tokens digits."""
NORM_EPS = 1e-6
"""Added to the squared length of q and k, so that a row of zeros stays one."""


@dataclass(frozen=True)
class Activation:
    """Which inputs come raw."""

    qk_l2norm: bool = False
    gate: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False

    @property
    def top(self) -> float:
        """What a raw beta cannot exceed: 2 where eigenvalues may be negative."""
        return 2.0 if self.neg_eigval else 1.0


class Backend(Protocol):
    """The stages. Formulas: docs/math.md; tensors between stages: plan/tensors.py."""

    def activate(
        self,
        q: Tensor,
        k: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        activation: Activation,
        tables: Tables,
        *,
        q_unit: Tensor | None,
        k_unit: Tensor | None,
        g: Tensor | None,
        beta: Tensor | None,
    ) -> None:
        """The inputs that have to be made ready; None for those that the stages take as they are.
        q_unit, k_unit: of length 1. g, beta: of a and b, activated where those come raw."""

    def prepare(
        self,
        k: Tensor,
        g: Tensor,
        beta: Tensor,
        tables: Tables,
        *,
        G: Tensor,
        Z: Tensor,
        bound: Tensor,
    ) -> None:
        """G = cumsum(g) in the chunk; Z with (I + D tril(K K^T, -1))^-1 = I + D Z; the sum of
        g + ln max(1, |1 - beta |k|^2|), g floored: no state grows by more than e^bound."""

    def summarize(
        self,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        G: Tensor,
        Z: Tensor,
        bound: Tensor,
        initial_state: Tensor | None,
        tables: Tables,
        *,
        S_border: Tensor,
        M: Tensor,
        M_bound: Tensor,
    ) -> None:
        """S_ext of every segment that leaves through a border, and M where it entered by one, with
        the sum of its `bound`. What that shows to be forgotten at the segment's end, by
        e^FORGOTTEN, may be left out."""

    def fold(
        self, M: Tensor, M_bound: Tensor, tables: Tables, chains: Chains, *, S: Tensor
    ) -> None:
        """S[leave] += M S[enter], segment after segment of each chain. An M that M_bound shows to
        be forgotten may be left out."""

    def adjoint_fold(
        self, M: Tensor, M_bound: Tensor, tables: Tables, chains: Chains, *, dS: Tensor
    ) -> None:
        """dS[enter] += M^T dS[leave], the chains from end to start."""

    def scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        G: Tensor,
        Z: Tensor,
        S_border: Tensor,
        initial_state: Tensor | None,
        scale: float,
        tables: Tables,
        *,
        o: Tensor | None,
        final_state: Tensor | None,
        S: Tensor | None,
        Uh: Tensor | None,
    ) -> None:
        """Output and states; the tapes S and Uh where they are wanted, o where it is."""

    def adjoint_summarize(
        self,
        q: Tensor,
        k: Tensor,
        beta: Tensor,
        do: Tensor,
        G: Tensor,
        Z: Tensor,
        bound: Tensor,
        d_final_state: Tensor | None,
        scale: float,
        tables: Tables,
        *,
        dS_border: Tensor,
    ) -> None:
        """dS_ext of every segment that entered through a border. What `bound` shows to be forgotten
        at the segment's start, by e^FORGOTTEN, may be left out."""

    def adjoint_scan(
        self,
        q: Tensor,
        k: Tensor,
        beta: Tensor,
        do: Tensor,
        G: Tensor,
        Z: Tensor,
        dS_border: Tensor,
        d_final_state: Tensor | None,
        scale: float,
        tables: Tables,
        *,
        dS: Tensor,
        dR: Tensor,
        d_initial_state: Tensor | None,
    ) -> None:
        """The tapes dS and dR, and the cotangents of the initial states."""

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        g: Tensor,
        beta: Tensor,
        do: Tensor,
        G: Tensor,
        S: Tensor,
        Uh: Tensor,
        dS: Tensor,
        dR: Tensor,
        scale: float,
        tables: Tables,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dg: Tensor,
        dbeta: Tensor,
    ) -> None:
        """Gradients of every token from the tapes, chunk by chunk."""

    def adjoint_activate(
        self,
        q: Tensor,
        k: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        activation: Activation,
        tables: Tables,
        dq_unit: Tensor | None,
        dk_unit: Tensor | None,
        dg: Tensor | None,
        dbeta: Tensor | None,
        *,
        dq: Tensor | None,
        dk: Tensor | None,
        da: Tensor | None,
        db: Tensor | None,
        dA_log: Tensor | None,
        ddt_bias: Tensor | None,
        gate_sums: Tensor | None,
    ) -> None:
        """Gradients of the inputs as they came, in dtypes of their own, from contiguous cotangents
        of what `activate` made, in the compute dtype; None for those that are not wanted: q's and
        k's together, A_log's and dt_bias's only with a raw gate's. Rows of no document get 0 and
        add nothing to the sums over tokens, dA_log and ddt_bias. gate_sums: scratch for those."""
