"""What the ranks returned, put together again by the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longdelta.plan.partition import Partition, partition
from longdelta.testing.workloads import Results, Workload


def plan_of(work: Workload, ranks: int, **build: Any) -> Partition:
    """The partition that `build_cp_context` agrees on."""
    return partition(work.offsets, ranks, rows=work.rows, **build)


def whole(plan: Partition, parts: Sequence[Results]) -> Results:
    """Results of the whole batch; what no rank returned stays not a number."""
    merged: dict[str, torch.Tensor | None] = {}
    for name in Results._fields:
        held = [getattr(part, name) for part in parts]
        if any(x is None for x in held):
            merged[name] = None
            continue
        if name in ("final_state", "d_initial_state"):
            owned = plan.ends if name == "final_state" else plan.starts
            full = held[0].new_full((plan.documents, *held[0].shape[1:]), float("nan"))
            for rank, x in enumerate(held):
                full[list(owned(rank))] = x
        else:
            full = held[0].new_full((1, plan.rows, *held[0].shape[2:]), float("nan"))
            for rank, x in enumerate(held):
                at = 0
                for start, stop in plan.rows_of(rank):
                    full[:, start:stop] = x[:, at : at + stop - start]
                    at += stop - start
                assert at == x.shape[1]
        merged[name] = full
    return Results(**merged)
