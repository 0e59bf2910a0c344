"""Launching compiled kernels: on the right device, with a record of what was launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name and how many programs it had."""

    program: str
    grid: int


_records: list[Launch] = []
_KEPT = 256


def records() -> tuple[Launch, ...]:
    """The latest launches of this process, oldest first.

    Source: this project.
    """
    return tuple(_records)


def forget_records() -> None:
    """Empties `records`."""
    _records.clear()


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(walks: int, longest: int, device: torch.device) -> int:
    """Programs of a stage that walks: one each, or one per SM that takes many short ones in turn.

    Walks of at most 32 chunks differ little, and the loads of the next overlap the end of the last.
    """
    return min(walks, multiprocessors(device)) if longest <= 32 else walks


def launch(
    kernel: Any, programs: int, like: Tensor, *arguments: Any, num_warps: int = 4, **constants: Any
) -> None:
    """Runs `programs` programs of a kernel on the device and current stream of `like`."""
    if not programs:
        return
    if len(_records) >= _KEPT:
        del _records[: _KEPT // 2]
    _records.append(Launch(kernel.__name__, programs))
    with torch.cuda.device(like.device):
        kernel[(programs,)](*arguments, num_warps=num_warps, **constants)
