"""What the op refuses of torch's transforms of functions."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack

from longdelta.errors import InvalidInput


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """An operator with a backward alone would drop a tangent without a word.

    Asked of the caller's tensors, where a functional transform shows itself, and again inside the
    operators, where autograd and compiled graphs arrive directly.
    """
    if forward_ad._current_level < 0:  # nobody has entered a level: there are no dual tensors
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise InvalidInput(
                "forward-mode differentiation (jvp, jacfwd, dual tensors) is not implemented; use "
                "reverse mode (backward, torch.autograd.grad)"
            )


def refuse_functional_grad() -> None:
    """Before torch does, whose words name neither the op nor a way out."""
    if torch.compiler.is_compiling():
        return
    transform = peek_interpreter_stack()
    if transform is not None and transform.key() == TransformType.Grad:
        raise InvalidInput(
            "torch.func.grad, vjp and jacrev are not implemented; use backward or "
            "torch.autograd.grad"
        )
