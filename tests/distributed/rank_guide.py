"""What a rank does in the test of the guide."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from longdelta.distributed.collectives import Group


def run_blocks(_: Group, blocks: list[str]) -> dict[str, Any]:
    """The guide's code, block after block, as one program; figures that it leaves behind."""
    scope: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(compile(block, "guide", "exec"), scope)
    context = scope["context"]
    gradients = [scope[name].grad for name in ("q", "k", "v", "g", "beta", "hidden")]
    return {
        "rows": context.rows,
        "finite": all(bool(torch.isfinite(x).all()) for x in gradients),
        "moving": all(x.abs().max() > 0 for x in gradients if x.numel()),
    }
