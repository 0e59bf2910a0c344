"""Activation checkpointing whose recomputation sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from longdelta.ops.recompute import RecomputeHandle


def checkpoint(
    fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **keywords: Any
) -> Any:
    """`torch.utils.checkpoint.checkpoint` with what crossed ranks kept for the recomputation.

    The states at segment borders and the halos that fn's first run exchanged are kept and given
    back when it runs again in the backward: gradients are equal bit for bit, and every collective
    of the forward happens once. (Plain checkpointing is correct too, and sends again.)

    Args:
        fn: called as fn(*args, **keywords) now and again in the backward; every rank of the group
            must checkpoint the same functions.
        use_reentrant: as in torch.
    Returns:
        What fn returns.
    Raises:
        As torch.utils.checkpoint.
    Source: this project; public interface of torch.utils.checkpoint only.
    """
    handle = RecomputeHandle(repeats=None)

    def run(*values: Any, **options: Any) -> Any:
        return handle.run(fn, *values, **options)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **keywords)
