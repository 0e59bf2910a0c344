"""Gated DeltaNet training kernels over packed documents, on one device or many ranks.

The public names are imported when first used, so that `import longdelta` needs torch alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from longdelta import distributed, nn, reference, runtime, testing
    from longdelta.api import chunk_gated_delta_rule, gdn_backward, gdn_forward
    from longdelta.distributed.checkpoint import checkpoint
    from longdelta.errors import InvalidInput, NotYet, UnsupportedProblem
    from longdelta.nn.conv import causal_conv1d
    from longdelta.ops.select import support
    from longdelta.plan.cost import bytes_needed

_HOME = {
    "chunk_gated_delta_rule": "longdelta.api",
    "gdn_forward": "longdelta.api",
    "gdn_backward": "longdelta.api",
    "causal_conv1d": "longdelta.nn.conv",
    "checkpoint": "longdelta.distributed.checkpoint",
    "bytes_needed": "longdelta.plan.cost",
    "support": "longdelta.ops.select",
    "InvalidInput": "longdelta.errors",
    "UnsupportedProblem": "longdelta.errors",
    "NotYet": "longdelta.errors",
}
_MODULES = ("distributed", "nn", "reference", "runtime", "testing")

__all__ = [
    "InvalidInput",
    "NotYet",
    "UnsupportedProblem",
    "bytes_needed",
    "causal_conv1d",
    "checkpoint",
    "chunk_gated_delta_rule",
    "distributed",
    "gdn_backward",
    "gdn_forward",
    "nn",
    "reference",
    "runtime",
    "support",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"longdelta.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'longdelta' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
