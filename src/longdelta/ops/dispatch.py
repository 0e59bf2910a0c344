"""Who looks on at a call of the op: whether torch's dispatcher has anybody to pass it to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

_TYPES = frozenset({Tensor, torch.nn.Parameter})
_MODE = torch._C._TorchDispatchModeKey
_PASSED = ("Autograd", "ADInplaceOrView", "Python", "FuncTorch", "Functionalize")
"""How keys begin that an operator takes out once they had their turn."""


def looked_on() -> bool:
    """Whether a compiler, profiler, mode, transform or tracer is about on this thread, or another
    operator that has gone below autograd: all but the first three show in what torch's dispatch
    includes and excludes here. Autocast and inference mode do not count."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_function_stack()
        or torch._C._autograd._profiler_enabled()
    ):
        return True
    return _dispatch() not in _quiet()


def traced() -> bool:
    """Whether what is called here goes into a graph, by a compiler or by another tracer."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(_MODE.PROXY) is not None
        or torch._C._get_dispatch_mode(_MODE.FUNCTIONAL) is not None
    )


def plain(tensors: Sequence[Any]) -> bool:
    """Whether all are tensors of no subclass, nor lazily negated, zero, wrapped or traced."""
    held = [x for x in tensors if x is not None]
    if not _TYPES.issuperset(map(type, held)):
        return False
    return {torch._C._dispatch_keys(x).raw_repr() for x in held} <= _plain_keys(held[0].device.type)


@lru_cache(maxsize=8)
def _plain_keys(device: str) -> frozenset[int]:
    """Dispatch keys of plain tensors on a device and on the CPU, as numbers; none for a device that
    holds no data."""
    if device not in ("cuda", "cpu"):
        return frozenset()
    keys = set()
    for inference, place in product((False, True), (device, "cpu")):
        with torch.inference_mode(inference):
            keys.add(torch._C._dispatch_keys(torch.empty(0, device=place)).raw_repr())
    return frozenset(keys)


@lru_cache(maxsize=1)
def _passed() -> int:
    """The keys that begin like _PASSED. Others are taken out for other reasons: autocast's where it
    is off, that of names on the threads of autograd."""
    keys = 0
    for name in dir(torch._C.DispatchKey):
        if name.startswith(_PASSED):
            key = getattr(torch._C.DispatchKey, name)
            keys |= torch._C.DispatchKeySet(key).raw_repr()
    return keys


def _dispatch() -> tuple[int, int]:
    """The keys that torch's dispatch includes on this thread, and those that it has passed."""
    included = torch._C._dispatch_tls_local_include_set().raw_repr()
    return included, torch._C._dispatch_tls_local_exclude_set().raw_repr() & _passed()


@lru_cache(maxsize=1)
def _quiet() -> frozenset[tuple[int, int]]:
    """What `_dispatch` gives outside of everything and in inference mode. Of a new thread: this one
    may be anywhere."""
    found = []

    def look() -> None:
        found.append(_dispatch())
        with torch.inference_mode():
            found.append(_dispatch())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return frozenset(found)
