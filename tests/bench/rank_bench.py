"""What a rank does in the tests of the benchmark on several ranks."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from longdelta import chunk_gated_delta_rule
from longdelta.bench.baselines import chosen_arms
from longdelta.bench.problem import Place
from longdelta.bench.results import Record
from longdelta.bench.rows import Row
from longdelta.bench.run import Options, Run, plan_of
from longdelta.distributed import build_cp_context, collectives
from longdelta.distributed.collectives import Group

from .scripted import SHORT, Scripted

OURS = ("ours", "ours_fast", "ours_heads")
PEERS = ("fla_kcp", "fla_heads", "flash_qla_cp", "flash_qla_heads", "flash_qla_one_gpu")


def contest(
    group: Group, folder: str, layout: str, arms: tuple[str, ...], tokens: int
) -> list[Record]:
    """A small row of three documents; peers are stood in for by our op."""
    stand_in(group)
    rank, ranks = collectives.place_in(group)
    place = Place(torch.device("cpu"), group, rank, ranks)
    row = Row("cut", 2, 4, (70, 1, tokens - 71), "mild", seed=5, layout=layout, K=8, V=8)
    given = replace(
        plan_of(Options(suite="smoke", out=Path(folder)), place),
        rows=(row,),
        arms=chosen_arms(arms, ranks),
        schedule=SHORT,
        modes=("eager",),
    )
    return Run(given, place, Scripted(lambda slot: 1.0 + rank)).all()


def stand_in(group: Group) -> None:
    """Modules with the peers' names and signatures, whose op is ours."""

    def op(*x: Tensor, cu_seqlens: Tensor | None = None, cp_context: Any = None) -> Any:
        return chunk_gated_delta_rule(*x, cu_seqlens=cu_seqlens, cp_context=cp_context)

    def fla_context(cu_seqlens: Tensor, group: Group, *, cu_seqlens_cpu: Tensor) -> Any:
        assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
        return build_cp_context(cu_seqlens_cpu, group)

    def qla_context(
        cu_seqlens: Tensor,
        *,
        enable_inter: bool,
        enable_intra: bool,
        group: Group,
        num_v_heads: int,
        chunk_size: int,
        cu_seqlens_cpu: Tensor,
        is_train: bool,
    ) -> Any:
        assert (enable_inter, enable_intra, is_train, num_v_heads, chunk_size) == (
            True,
            True,
            True,
            4,
            64,
        )
        return build_cp_context(cu_seqlens_cpu, group)

    backend = type("FlashQLABackend", (), {"default_enable": True})
    gdr, cp = "fla.ops.gated_delta_rule", "flash_qla.ops.gated_delta_rule.chunk.cp.context"
    module("fla")
    module(gdr, chunk_gated_delta_rule=op)
    module(f"{gdr}.backends.flash_qla", FlashQLABackend=backend)
    module("fla.ops.cp", build_cp_context=fla_context)
    module("flash_qla", chunk_gated_delta_rule=op)
    module(cp, build_cp_context=qla_context)


def module(name: str, **attributes: object) -> None:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.__dict__.update(attributes)
    sys.modules[name] = made
