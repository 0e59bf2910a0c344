"""Context parallelism: many ranks, the same op, the same bits."""

from longdelta.distributed.checkpoint import checkpoint
from longdelta.distributed.context import CPContext, build_cp_context
from longdelta.ops.recompute import RecomputeHandle

__all__ = ["CPContext", "RecomputeHandle", "build_cp_context", "checkpoint"]
