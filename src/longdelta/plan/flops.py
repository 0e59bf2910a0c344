"""Floating-point operations and traffic of each stage.

Note [Products]: per chunk of C tokens and value head, with G value heads per q/k head, the stages
are sums of B = 2 C K V (a tile against a state), B_K = 2 C K K (against a transition),
m_K = 2 C C K, m_V = 2 C C V and t = 2 C^3; products of q and k alone are made once per q/k head.
The elementwise work is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from longdelta.plan.chunks import CHUNK, Walk
from longdelta.plan.tensors import Counts, itemsize, shape

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of q, k, v, o and their gradients, by dtype."""


@dataclass(frozen=True)
class Heads:
    """H q/k heads of K columns and HV value heads of V columns."""

    H: int
    HV: int
    K: int = 128
    V: int = 128

    @property
    def state_elements(self) -> int:
        """Elements of one state of all value heads."""
        return self.HV * self.K * self.V

    @property
    def map_elements(self) -> int:
        """Elements of one transition M of all value heads."""
        return self.HV * self.K * self.K


@dataclass(frozen=True)
class StageCost:
    """Floating-point operations of a stage, and bytes if it reads and writes each tensor once."""

    stage: str
    direction: str
    flops: int
    bytes_moved: int


@dataclass(frozen=True)
class _Part:
    """Chunks and tokens of some of a rank's segments."""

    chunks: int
    tokens: int


def stage_costs(
    tables: Walk,
    heads: Heads,
    *,
    dtype: str = "bfloat16",
    save: str = "light",
    backend: str = "eager",
) -> tuple[StageCost, ...]:
    """Cost of each stage of a forward and a backward on one rank, in the order of the calls.

    The backward makes again what `save` did not keep. Source: docs/math.md, Note [Products].

    >>> from longdelta.plan.chunks import walk
    >>> costs = stage_costs(walk([0, 64], HV=3), Heads(1, 3))
    >>> round(sum(each.flops for each in costs if each.direction == "forward") / (64 * 3), -2)
    146100.0
    """
    H, HV, K, V = heads.H, heads.HV, heads.K, heads.V
    B, BK = 2 * CHUNK * K * V, 2 * CHUNK * K * K
    mk, mv, t = 2 * CHUNK * CHUNK * K, 2 * CHUNK * CHUNK * V, 2 * CHUNK**3
    every = _part(tables, True, True, True, True)
    first = _part(tables, False, True, False, False)
    middle = _part(tables, False, False, True, False)
    last = _part(tables, False, False, False, True)
    leaving = _Part(first.chunks + middle.chunks, first.tokens + middle.tokens)
    entering = _Part(middle.chunks + last.chunks, middle.tokens + last.tokens)
    fold = 2 * K * K * V * HV * tables.maps
    flops = {
        "prepare": every.chunks * (H * mk + HV * t // 2),
        "summarize": leaving.chunks * HV * (2 * B + mk) + middle.chunks * HV * 2 * BK,
        "fold": fold,
        "scan": every.chunks * (HV * (3 * B + 2 * mv) + H * mk),
        "tapes": every.chunks * HV * (2 * B + mv),
        "adjoint_summarize": entering.chunks * (HV * (3 * B + 2 * mk) + H * mk),
        "adjoint_fold": fold,
        "adjoint_scan": every.chunks * HV * (3 * B + 2 * mv + mk),
        "gradients": every.chunks * (HV * (3 * B + 2 * mv + 3 * mk) + 2 * H * mk),
    }
    touched = {"summarize": leaving, "adjoint_summarize": entering}
    traffic = {
        stage: _traffic(names, touched.get(stage, every), tables, heads, dtype, backend)
        for stage, names in _TENSORS.items()
    }
    return tuple(
        StageCost(stage, direction, flops[stage], traffic[stage])
        for direction, stages in (("forward", _FORWARD), ("backward", _BACKWARD[save]))
        for stage in stages
    )


_FORWARD = ("prepare", "summarize", "fold", "scan")
_ADJOINT = ("adjoint_summarize", "adjoint_fold", "adjoint_scan", "gradients")
_BACKWARD = {
    "none": ("prepare", "summarize", "fold", "tapes", *_ADJOINT),
    "light": ("prepare", "tapes", *_ADJOINT),
    "full": _ADJOINT,
}

_TENSORS = {
    "prepare": "k g beta G Z bound",
    "summarize": "k v beta G Z bound S_border M M_bound",
    "fold": "M M_bound S_border S_border",
    "scan": "q k v beta G Z S_border o",
    "tapes": "k v beta G Z S_border S Uh",
    "adjoint_summarize": "q k do beta G Z bound dS_border",
    "adjoint_fold": "M M_bound dS_border dS_border",
    "adjoint_scan": "q k do beta G Z dS_border dS dR",
    "gradients": "q k do g beta G S Uh dS dR dq dk dv dbeta dg",
}
"""What each stage reads and writes; `tapes` is scan without o, adjoint_fold is fold with M^T."""


def _part(tables: Walk, whole: bool, first: bool, middle: bool, last: bool) -> _Part:
    wanted = {
        (False, False): whole,
        (False, True): first,
        (True, True): middle,
        (True, False): last,
    }
    chunks = tokens = 0
    for segment in tables.segments:
        if wanted[segment.enter >= 0, segment.leave >= 0]:
            chunks += segment.chunks
            stop = segment.first_chunk + segment.chunks
            tokens += sum(tables.chunk_length[segment.first_chunk : stop])
    return _Part(chunks, tokens)


def _traffic(names: str, part: _Part, tables: Walk, heads: Heads, dtype: str, backend: str) -> int:
    per_token = {
        **dict.fromkeys(("q", "k", "dq", "dk"), heads.H * heads.K * ITEMSIZE[dtype]),
        **dict.fromkeys(("v", "o", "do", "dv"), heads.HV * heads.V * ITEMSIZE[dtype]),
        **dict.fromkeys(("g", "beta", "dg", "dbeta"), heads.HV * max(4, ITEMSIZE[dtype])),
    }
    counts = Counts(part.chunks, tables.borders, tables.maps)
    total = 0
    for name in names.split():
        if name in per_token:
            total += part.tokens * per_token[name]
        else:
            size = itemsize(name, dtype, backend)
            for extent in shape(name, counts, heads.HV, heads.K, heads.V):
                size *= extent
            total += size
    return total
