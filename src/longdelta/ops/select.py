"""Which backend runs a problem here, and why the others do not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch

from longdelta.errors import InvalidInput, UnsupportedProblem
from longdelta.kernels import eager
from longdelta.kernels.stages import Backend
from longdelta.ops import self_test
from longdelta.runtime.toolchain import TRITON_CHECKED, triton_version

BACKENDS = ("auto", "gluon", "eager")
_selected: dict[tuple[torch.device, torch.dtype, int, int, str], str] = {}
"""What is settled; a backend that could not be tested yet is asked for again."""


@dataclass(frozen=True)
class Support:
    """The backend that runs a problem here, and the reason why each other one does not."""

    backend: str
    reasons: dict[str, str]


def _gluon_reason(device: torch.device, dtype: torch.dtype, K: int, V: int) -> str | None:
    """Why the Hopper kernels cannot run this; None where they can."""
    if device.type != "cuda":
        return f"needs an NVIDIA Hopper GPU (sm_90a); the tensors are on {device.type}"
    checked = (
        f"Triton {', '.join(TRITON_CHECKED)} (the releases that its kernels were checked with)"
    )
    triton = triton_version()
    if triton is None:
        return f"needs {checked}; none is installed"
    if ".".join(triton.split(".")[:2]) not in TRITON_CHECKED:
        return f"needs {checked}; found {triton}"
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs a Hopper GPU (sm_90a); found {torch.cuda.get_device_name(device)}"
    if dtype != torch.bfloat16:
        return f"takes bfloat16; q, k and v are {dtype}"
    if (K, V) != (128, 128):
        return f"takes K = V = 128; found K = {K}, V = {V}"
    return self_test.fault(device)


def support(
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_k_dim: int = 128,
    head_v_dim: int = 128,
    backend: str = "auto",
) -> Support:
    """Which backend `chunk_gated_delta_rule` would run, and why not each of the others.

    Where the Hopper kernels could, a small problem runs through them first, once per GPU and
    versions of Triton, ptxas and torch (with a call that compiles them: up to half a minute).

    Args:
        device: of q, k and v; default: the current GPU where there is one, else the CPU.
        dtype: of q, k and v.
        head_k_dim, head_v_dim: K and V.
        backend: "auto", or the one that is asked for.
    Returns:
        ``Support(backend, reasons)``; `reasons` maps each backend that does not run to a sentence.
    Raises:
        InvalidInput: no backend has this name, or torch finds no such device.
        UnsupportedProblem: the backend asked for does not take the problem.
    Source: this project; the shapes and dtypes are those of ``chunk_gated_delta_rule``.
    """
    if backend not in BACKENDS:
        raise InvalidInput(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device must be one that torch finds here, {torch.cuda.device_count()} GPUs and the "
            f"CPU; got {str(place)!r}: use another, or a build of torch for this machine's GPUs"
        )
    reason = _gluon_reason(place, dtype, head_k_dim, head_v_dim)
    if backend == "gluon" and reason is not None:
        raise UnsupportedProblem(
            f"backend='gluon' cannot run this: gluon {reason}. Use backend='auto' or 'eager'."
        )
    if backend == "eager":
        return Support("eager", {"gluon": "was not asked for"})
    if reason is not None:
        return Support("eager", {"gluon": reason})
    return Support("gluon", {"eager": "is the slower one"})


def selected(device: torch.device, dtype: torch.dtype, K: int, V: int, backend: str) -> str:
    """Name of the backend that runs; says once where a GPU does not get its fast one."""
    problem = (device, dtype, K, V, backend)
    name = _selected.get(problem)
    if name is None:
        found = support(device=device, dtype=dtype, head_k_dim=K, head_v_dim=V, backend=backend)
        if backend == "auto" and device.type == "cuda" and found.backend != "gluon":
            _say_once(found.backend, found.reasons["gluon"])
        name = found.backend
        if name != "gluon" or self_test.is_settled(device):
            _selected[problem] = name
    return name


@lru_cache(maxsize=64)
def _say_once(backend: str, reason: str) -> None:
    warnings.warn(f"longdelta runs its {backend} backend: gluon {reason}", stacklevel=2)


@lru_cache(maxsize=8)
def stages(name: str) -> Backend:
    """The stages of a backend."""
    if name == "gluon":
        # Only here: Triton need not be installed where nothing asks for it.
        from longdelta.kernels import gluon

        return cast(Backend, gluon)
    return cast(Backend, eager)
