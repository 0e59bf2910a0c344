"""The reference's stages on a whole workload, in the layout of the stage ABI.

`reference_stages` runs the plain float64 stages, one document and head after another, and places
what they give where a backend places it: padded chunks, borders, maps. `StageCase` hands these
tensors to a backend's stage as inputs, rounded to the compute dtype, and checks its outputs: each
stage is tested alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longdelta.kernels.stages import Tables
from longdelta.ops.saved import Sizes, compute_dtype
from longdelta.plan.chunks import Segment, Walk, walk
from longdelta.plan.tensors import Counts, shape
from longdelta.reference import chunked
from longdelta.testing.budgets import assert_within, budget
from longdelta.testing.workloads import Machine, Workload

_STATES = ("initial_state", "final_state", "d_initial_state", "d_final_state")
_ROWS = ("o", "dq", "dk", "dv", "dg", "dbeta")
_TAPES = ("S", "Uh", "dS_ext", "dS_border", "dS", "dR")
_STAGED = ("G", "Z", "bound", "S_ext", "M", "M_bound", "S_border", *_TAPES)
_SAME_SHAPE = {"S_ext": "S_border", "dS_ext": "dS_border"}


def _zeros(work: Workload, plan: Walk) -> dict[str, Tensor]:
    H, HV, K, V, T = work.H, work.HV, work.K, work.V, work.rows
    shapes: dict[str, tuple[int, ...]] = {
        name: shape(_SAME_SHAPE.get(name, name), Counts.of(plan), HV, K, V) for name in _STAGED
    }
    shapes |= {name: (len(work.lengths), HV, K, V) for name in _STATES}
    shapes |= {"o": (T, HV, V), "dq": (T, H, K), "dk": (T, H, K), "dv": (T, HV, V)}
    shapes |= {"dg": (T, HV), "dbeta": (T, HV)}
    return {name: torch.zeros(extents, dtype=torch.float64) for name, extents in shapes.items()}


class _Head:
    """One document and value head: its segments' chunks, and where their tensors go."""

    def __init__(
        self,
        work: Workload,
        plan: Walk,
        found: dict[str, Tensor],
        x: dict[str, Tensor],
        document: int,
        head: int,
    ) -> None:
        self.plan, self.found, self.document, self.head = plan, found, document, head
        self.key_head = head // (work.HV // work.H)
        self.scale = work.scale
        self.segments = [s for s in plan.segments if s.document == document]
        self.x = [{name: self._cut(name, y, s) for name, y in x.items()} for s in self.segments]
        for segment, y in zip(self.segments, self.x, strict=True):
            prepared = chunked.prepare(y["k"], y["g"], y["beta"])
            y["G"], y["Z"] = prepared.G, prepared.Z
            for name, chunks in prepared._asdict().items():
                self.put_chunks(name, segment, chunks)

    def rows(self, segment: Segment) -> list[slice]:
        first = segment.first_chunk
        return [
            slice(self.plan.chunk_row[c], self.plan.chunk_row[c] + self.plan.chunk_length[c])
            for c in range(first, first + segment.chunks)
        ]

    def _cut(self, name: str, y: Tensor, segment: Segment) -> list[Tensor]:
        head = self.key_head if name in ("q", "k") else self.head
        return [y[rows, head] for rows in self.rows(segment)]

    def put_chunks(self, name: str, segment: Segment, chunks: list[Tensor]) -> None:
        """Padded places: the sums of the gate go on without decay, the rest is zero."""
        for index, chunk in enumerate(chunks):
            place = self.found[name][segment.first_chunk + index, self.head]
            if name == "G":
                place[:] = chunk[-1]
            place[tuple(slice(extent) for extent in chunk.shape)] = chunk

    def add_rows(self, name: str, segment: Segment, chunks: list[Tensor]) -> None:
        head = self.key_head if name in ("dq", "dk") else self.head
        for rows, chunk in zip(self.rows(segment), chunks, strict=True):
            self.found[name][rows, head] += chunk

    def forward(self) -> list[chunked.ScanTape]:
        """Summaries, fold, scan; returns the tape of each segment."""
        found, h = self.found, self.head
        state = found["initial_state"][self.document, h]
        zero, entering, tapes = torch.zeros_like(state), state, []
        for segment, y in zip(self.segments, self.x, strict=True):
            operands = (y["k"], y["v"], y["G"], y["Z"], y["beta"])
            run = chunked.scan(y["q"], *operands, entering, scale=self.scale)
            tapes.append(run.tape)
            self.add_rows("o", segment, run.o)
            self.put_chunks("S", segment, run.tape.S)
            self.put_chunks("Uh", segment, run.tape.Uh)
            if segment.leave < 0:
                found["final_state"][self.document, h] = run.S_out
                continue
            step = chunked.summarize(*operands, state if segment.enter < 0 else zero)
            found["S_ext"][segment.leave, h] = step.B
            if segment.map >= 0:
                found["M"][segment.map, h] = step.M
                chunks = slice(segment.first_chunk, segment.first_chunk + segment.chunks)
                found["M_bound"][segment.map, h] = found["bound"][chunks, h].sum()
            entering = step.B if segment.enter < 0 else step.M @ entering + step.B
            found["S_border"][segment.leave, h] = entering
        return tapes

    def backward(self, tapes: list[chunked.ScanTape]) -> None:
        """Adjoint summaries, fold, adjoint scan, gradients."""
        found, h = self.found, self.head
        last = found["d_final_state"][self.document, h]
        zero, leaving = torch.zeros_like(last), last
        for segment, y, tape in reversed(list(zip(self.segments, self.x, tapes, strict=True))):
            operands = (y["q"], y["k"], y["G"], y["Z"], y["beta"], y["do"])
            run = chunked.adjoint_scan(*operands, leaving, scale=self.scale)
            self.put_chunks("dS", segment, run.tape.dS)
            self.put_chunks("dR", segment, run.tape.dR)
            part = chunked.gradients(
                y["q"],
                y["k"],
                y["g"],
                y["beta"],
                y["do"],
                tape,
                run.tape,
                scale=self.scale,
            )
            for name, chunks in part._asdict().items():
                self.add_rows(name, segment, chunks)
            if segment.enter < 0:
                found["d_initial_state"][self.document, h] = run.dS_in
                continue
            start = last if segment.leave < 0 else zero
            dS_ext = chunked.adjoint_summarize(*operands, start, scale=self.scale)
            found["dS_ext"][segment.enter, h] = dS_ext
            carried = zero if segment.leave < 0 else found["M"][segment.map, h].T @ leaving
            leaving = dS_ext + carried
            found["dS_border"][segment.enter, h] = leaving


@lru_cache(maxsize=32)
def reference_stages(work: Workload, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Every tensor between the stages, in float64, of inputs rounded to `dtype`.

    S_ext and dS_ext are the border rows before the fold, S_border and dS_border after it. Padded
    places of a ragged chunk: G repeats its last value, the rest is zero.
    """
    plan = walk(work.offsets, work.HV, rows=work.rows)
    inputs, cotangents = work.inputs(dtype), work.cotangents(dtype)
    assert cotangents.do is not None
    assert cotangents.d_final_state is not None
    x = {name: getattr(inputs, name)[0].double() for name in ("q", "k", "v", "g", "beta")}
    x["do"] = cotangents.do[0].double()
    found = _zeros(work, plan)
    if inputs.initial_state is not None:
        found["initial_state"] += inputs.initial_state.double()
    found["d_final_state"] += cotangents.d_final_state.double()
    for document, length in enumerate(work.lengths):
        for head in range(work.HV if length else 0):
            one = _Head(work, plan, found, x, document, head)
            one.backward(one.forward())
    return found


class StageCase:
    """A workload as one stage sees it: packed inputs, tables, the reference's other tensors."""

    def __init__(self, work: Workload, dtype: torch.dtype, machine: Machine) -> None:
        inputs, cotangents = machine.inputs(work, dtype), machine.cotangents(work, dtype)
        self.work, self.dtype = work, dtype = machine.fit(work), machine.dtype(dtype)
        self.device, self.budgets = torch.device(machine.device), machine.budgets(work)
        self.scale = work.scale
        assert cotangents.do is not None
        self.q, self.k, self.v = inputs.q[0], inputs.k[0], inputs.v[0]
        self.g, self.beta = inputs.g[0], inputs.beta[0]
        self.do = cotangents.do[0]
        self.initial_state = inputs.initial_state
        self.d_final_state = cotangents.d_final_state
        plan = walk(work.offsets, work.HV, rows=work.rows)
        self.tables = Tables(plan, self.device)
        self._reference = reference_stages(work, dtype)
        self._sizes = Sizes(Counts.of(plan), work.HV, work.K, work.V, dtype, machine.backend)

    def _dtype(self, name: str) -> torch.dtype:
        if name in _STAGED:
            name = _SAME_SHAPE.get(name, name)
            return self._sizes.new((name,), torch.device("meta"))[name].dtype
        return self.dtype if name in ("o", "dq", "dk", "dv") else compute_dtype(self.dtype)

    def given(self, *names: str) -> tuple[Tensor, ...]:
        """The reference's tensors, in the dtype in which stages hand them on."""
        return tuple(
            self._reference[name].to(self.device, self._dtype(name), copy=True) for name in names
        )

    def poisoned(self, *names: str) -> dict[str, Tensor]:
        """Outputs full of NaN."""
        return {
            name: torch.full_like(
                self._reference[name], float("nan"), dtype=self._dtype(name), device=self.device
            )
            for name in names
        }

    def check(self, scales: dict[str, Tensor] | None = None, **outputs: Tensor) -> None:
        """Each output against the reference, within its budget.

        States of documents without tokens are left out: no stage walks those.
        """
        held = [document for document, length in enumerate(self.work.lengths) if length]
        for name, out in outputs.items():
            ref = self._reference[name]
            if name in _STATES:
                out, ref = out[held], ref[held]
            allowed = budget(self.budgets, name, out.dtype)
            assert_within(name, out, ref, allowed, (scales or {}).get(name))
            if name in _ROWS:
                rest = out[self.work.offsets[-1] :]
                assert not rest.any(), f"{name}: rows after the last document must be zero"


def run_stage(stage: Callable[..., None], *operands: Any, **outputs: Tensor) -> dict[str, Tensor]:
    """Calls a stage and returns what it wrote, by name."""
    stage(*operands, **outputs)
    return outputs
