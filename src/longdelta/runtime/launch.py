"""Launching compiled kernels: on the right device, without resolving what is known already.

Note [Launch table]: Triton's own launch looks at every argument, builds a key of strings and binds
names, about 0.1 ms of host time for the longer kernels here. What may change the machine code is
little: the constants, each tensor's dtype and 16-byte alignment, and whether an integer is 1 or a
multiple of 16. A table from that to the compiled kernel leaves one call into the driver.
"""

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


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_records: list[Launch] = []
_KEPT = 256


def records() -> tuple[Launch, ...]:
    """The latest launches of this process, oldest first.

    Source: this project.
    """
    return tuple(_records)


def forget_records() -> None:
    """Empties `records`.

    Source: this project.
    """
    _records.clear()


def forget() -> None:
    """Empties `records` and Note [Launch table]: the next launches are resolved afresh.

    Source: this project.
    """
    forget_records()
    _compiled.clear()


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(walks: int, longest: int, device: torch.device) -> int:
    """Programs of a stage that walks: one each, or one per SM that takes many short ones in turn.

    Walks of at most 32 chunks differ little, and the loads of the next overlap the end of the last.
    """
    return min(walks, multiprocessors(device)) if longest <= 32 else walks


def _kind(argument: Any) -> Any:
    """What the machine code may depend on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument)


def launch(
    kernel: Any, programs: int, like: Tensor, *arguments: Any, num_warps: int = 4, **constants: Any
) -> None:
    """Runs `programs` programs of a kernel on the device and current stream of `like`.

    arguments: the kernel's, in order, up to its constants; tensor descriptors of one kernel's place
    have one dtype and tile. constants: its constexpr arguments, which come last, and options.
    """
    if not programs:
        return
    if len(_records) >= _KEPT:
        del _records[: _KEPT // 2]
    _records.append(Launch(kernel.__name__, programs))
    key = (id(kernel), like.device, num_warps, *constants.items(), *map(_kind, arguments))
    with torch.cuda.device(like.device):
        if key not in _compiled:
            compiled = kernel[(programs,)](*arguments, num_warps=num_warps, **constants)
            names = kernel.arg_names[len(arguments) :]
            _compiled[key] = (compiled, tuple(constants[name] for name in names))
            return
        compiled, values = _compiled[key]
        stream = torch.cuda.current_stream().cuda_stream
        compiled.run(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
            *values,
        )
