"""What there is to compile: each kernel declares its variants beside itself, in these words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longdelta.kernels.gluon.tiles import FLAT, FLAT_FP32, RAGGED


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants, as a launch would compile it."""

    name: str
    kernel: Any
    products: int
    """wgmma instructions that it must have."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    """Of arguments that are not what `TYPES` says."""
    spills: int = 16
    """Bytes that a thread may spill: outside of loops so few cost nothing that can be measured."""
    others_handed_back: bool = False
    """Whether it arrives for one buffer while it loads vectors from another, which goes back by an
    arrival of its own: machine_code.py, Note [Handing back]."""


def _tile(dtype: str, shape: list[int], layout: Any) -> str:
    return f"tensordesc<{dtype}{shape},{layout!r}>"


_STATES = ("border", "transition", "initial", "final", "S")
_VECTORS = ("g", "beta", "G", "bound", "M_bound", "transition_bound")
TYPES = {
    **dict.fromkeys(("q", "k"), "*bf16"),
    **dict.fromkeys((*_STATES, *_VECTORS), "*fp32"),
    **dict.fromkeys(("tasks", "chunks", "table"), "*i32"),
    **dict.fromkeys(("HV", "H", "GROUP", "parts", "n_tasks", "chains", "PER"), "i32"),
    **dict.fromkeys(("k_t", "k_h"), "i32:16"),
    **dict.fromkeys(("qd", "kd"), _tile("bf16", [1, 64, 1, 128], RAGGED)),
    **dict.fromkeys(("vd", "od", "dod"), _tile("bf16", [1, 64, 1, 64], RAGGED)),
    "md": _tile("fp32", [128, 128], FLAT_FP32),
    "zd": _tile("fp16", [64, 64], FLAT),
    "sd": _tile("bf16", [128, 64], FLAT),
    "ud": _tile("bf16", [64, 64], FLAT),
    "scale": "fp32",
}
"""Type of an argument by its name, which means the same in every kernel; `:16` is a multiple of
16. Pointers are aligned to 16 bytes."""
