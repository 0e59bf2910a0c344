"""Objects that travel through an operator as a small tensor.

An operator's schema takes tensors. A handle is an int64 CPU tensor whose entries name an object in
a weak table: a compiled graph does not specialise on it, and an object that is gone is an error,
not a wrong answer. The tensor owns the object, so that what an autograd graph saves keeps it alive;
the object must not own the tensor, or only the garbage collector would free the two.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from longdelta.errors import InvalidInput

_held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next = itertools.count(1)


def handle_of(thing: object, entries: int = 1) -> Tensor:
    """A new handle, which keeps the object alive; the table does not.

    entries: its length, all that a compiled graph may know of the object.
    """
    number = next(_next)
    _held[number] = thing
    with torch.inference_mode(False):
        handle = torch.full([entries], number, dtype=torch.int64, device="cpu")
    handle.owner = thing  # type: ignore[attr-defined]
    return handle


def held_by(handle: Tensor, name: str) -> Any:
    """The object behind a handle."""
    thing = _held.get(int(handle[0]))
    if thing is None:
        raise InvalidInput(
            f"{name} must be alive when the operation runs, in the backward too; it was collected. "
            "Keep a reference to it until the backward is done"
        )
    return thing
