"""What a rank does in the test of context and data parallelism together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from longdelta.distributed import build_cp_context
from longdelta.distributed.collectives import Group
from longdelta.testing.workloads import Cotangents, Results, Workload, evaluate


def replicas(work: Workload) -> list[Workload]:
    """One batch for each data-parallel replica, with other documents and other values."""
    return [work, replace(work, lengths=work.lengths[::-1], seed=1)]


def on_mesh(_: Group, work: Workload, build: dict[str, Any]) -> tuple[int, Results]:
    """The replica of this rank, and its rows' results."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica = mesh.get_local_rank("dp")
    mine = replicas(work)[replica]
    context = build_cp_context(mine.offsets, mesh.get_group("cp"), rows=mine.rows, **build)
    assert context.ranks == 2
    assert context.rank == mesh.get_local_rank("cp")
    x, (do, d_state) = mine.inputs(torch.float32), mine.cotangents(torch.float32)
    assert x.initial_state is not None
    assert do is not None
    assert d_state is not None
    local = x.with_(
        **{name: context.shard(getattr(x, name)) for name in ("q", "k", "v", "g", "beta")},
        initial_state=x.initial_state[list(context.starts)],
        cu_seqlens=None,
    )
    cotangents = Cotangents(context.shard(do), d_state[list(context.ends)])
    return replica, evaluate(local, cotangents, cp_context=context)
