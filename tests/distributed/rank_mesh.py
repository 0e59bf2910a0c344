"""What a rank does in the test of context and data parallelism together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from longdelta.distributed import build_cp_context
from longdelta.distributed.collectives import Group
from longdelta.errors import InvalidInput
from longdelta.testing.workloads import Cotangents, Results, Workload, evaluate


def replicas(work: Workload) -> list[Workload]:
    """One batch for each data-parallel replica, with other documents and other values."""
    return [work, replace(work, lengths=work.lengths[::-1], seed=1)]


def on_mesh(_: Group, work: Workload, build: dict[str, Any]) -> tuple[int, Results]:
    """The replica of this rank, and its rows' results."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica = mesh.get_local_rank("dp")
    mine = replicas(work)[replica]
    # A mesh of one dimension stands for its group.
    group = mesh["cp"] if build["layout"] == "zigzag" else mesh.get_group("cp")
    context = build_cp_context(mine.offsets, group, rows=mine.rows, **build)
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


def whole_mesh(_: Group) -> str:
    """What a mesh of two dimensions is told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    try:
        build_cp_context([0, 64], mesh)
    except InvalidInput as error:
        return str(error)
    return "no error"
