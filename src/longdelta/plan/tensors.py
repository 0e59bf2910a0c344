"""What every tensor between the stages measures, and what each save mode keeps.

Note [Capacity]: the saved set is one flat tensor of bytes; `layout` places the tensors of the
packing at hand inside it, one after another. A compiled graph knows T, N and HV, not where
documents start: there it has the bytes that the worst packing of (T, N, HV) needs, elsewhere those
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from longdelta.plan.chunks import CHUNK, LONGEST_SEGMENT, WALKS_AT_ONCE, Walk

SAVE_MODES = ("none", "light", "full")
KEPT = {
    "none": (),
    "light": ("S_border", "M", "M_bound"),
    "full": ("S_border", "M", "M_bound", "G", "Z", "bound", "S", "Uh"),
}
"""Stage tensors that each save mode hands from the forward to the backward."""

FORWARD = ("G", "Z", "bound", "S_border", "M", "M_bound")
BACKWARD = (*FORWARD, "S", "Uh", "dS_border", "dS", "dR")
"""Stage tensors that a forward and a backward need in all."""
ACTIVATED = ("q_unit", "k_unit", "g", "beta")
"""Those of them that either makes before its stages, where the inputs do not come ready."""
COTANGENTS = {
    "q_unit": ("dq_unit",),
    "k_unit": ("dk_unit",),
    "g": ("dg", "gate_sums"),
    "beta": ("dbeta",),
}
"""What a backward has besides, for each of ACTIVATED that it makes."""

_ALIGNMENT = 256


@dataclass(frozen=True)
class Counts:
    """How many chunks, borders and maps a call has: exactly, or at most."""

    chunks: int
    borders: int
    maps: int

    @classmethod
    def of(cls, walk: Walk) -> Counts:
        return cls(walk.chunks, walk.borders, walk.maps)


def capacity(T: int, N: int, HV: int, edges: int = 0) -> Counts:
    """The most that T rows in N documents can have.

    edges: across ranks, how often a document of this rank goes on on another one, before or after;
    N then counts the rank's fragments.

    >>> capacity(T=4096, N=3, HV=6)
    Counts(chunks=67, borders=8, maps=8)
    """
    # A document's segments are 8 chunks long or longer, and no more than WALKS_AT_ONCE / HV, or
    # else LONGEST_SEGMENT long; a fragment has one border more within it.
    shortest = T // (CHUNK * 8)
    longest = T // (CHUNK * LONGEST_SEGMENT)
    borders = min(shortest, longest + N * (WALKS_AT_ONCE // HV + 1))
    return Counts(T // CHUNK + N + edges, borders + 2 * edges, borders + 2 * edges)


def shape(
    name: str, counts: Counts, HV: int, K: int, V: int, *, T: int = 0, H: int = 0
) -> tuple[int, ...]:
    """Shape of a stage tensor. T, H: rows and q/k heads, which only ACTIVATED and COTANGENTS have.

    q_unit, k_unit: q and k of length 1. g, beta: gate and beta as the rule takes them. dq_unit,
    dk_unit, dg, dbeta: their cotangents. gate_sums: scratch for the gradients of A_log and dt_bias.
    G: cumulative gate in the chunk. Z: unit inverse without its factors of beta (docs/math.md).
    bound: log of a bound of the chunk's transition; what it shows to be forgotten is left out.
    S_border, dS_border: state and cotangent at each border. M: transition of each segment between
    two borders. M_bound: log of a bound of M, the sum over its chunks; fold passes by what it shows
    to be forgotten. S, Uh: scan's tapes (state at each chunk's start; U without beta). dS, dR:
    adjoint_scan's tapes (cotangent at each chunk's end; dW without beta).

    >>> shape("S", Counts(10, 2, 1), HV=6, K=128, V=64)
    (10, 6, 128, 64)
    """
    chunks, borders, maps = counts.chunks, counts.borders, counts.maps
    return {
        "q_unit": (T, H, K),
        "k_unit": (T, H, K),
        "g": (T, HV),
        "beta": (T, HV),
        "dq_unit": (T, H, K),
        "dk_unit": (T, H, K),
        "dg": (T, HV),
        "dbeta": (T, HV),
        "gate_sums": (2, -(-T // CHUNK), HV),
        "G": (chunks, HV, CHUNK),
        "Z": (chunks, HV, CHUNK, CHUNK),
        "bound": (chunks, HV),
        "S_border": (borders, HV, K, V),
        "M": (maps, HV, K, K),
        "M_bound": (maps, HV),
        "S": (chunks, HV, K, V),
        "Uh": (chunks, HV, CHUNK, V),
        "dS_border": (borders, HV, K, V),
        "dS": (chunks, HV, K, V),
        "dR": (chunks, HV, CHUNK, V),
    }[name]


_GLUON_ITEMSIZE = {
    "g": 4,
    "beta": 4,
    "dq_unit": 4,
    "dk_unit": 4,
    "dg": 4,
    "dbeta": 4,
    "gate_sums": 4,
    "G": 4,
    "Z": 2,
    "bound": 4,
    "S_border": 4,
    "M": 4,
    "M_bound": 4,
    "dS_border": 4,
}


def itemsize(name: str, dtype: str, backend: str = "eager") -> int:
    """Bytes of one element of a stage tensor.

    The eager backend computes in float32 (in float64 for float64 inputs); Hopper kernels hold
    states and gates in float32, the rest in 16 bits.

    >>> itemsize("S", "bfloat16"), itemsize("S", "float64"), itemsize("S", "bfloat16", "gluon")
    (4, 8, 2)
    """
    if backend == "gluon":
        return _GLUON_ITEMSIZE.get(name, 2)
    return 8 if dtype == "float64" else 4


@dataclass(frozen=True)
class Place:
    """Where a stage tensor lies in a flat buffer of bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def layout(
    names: tuple[str, ...],
    counts: Counts,
    *,
    HV: int,
    K: int,
    V: int,
    T: int = 0,
    H: int = 0,
    dtype: str = "bfloat16",
    backend: str = "eager",
) -> tuple[tuple[Place, ...], int]:
    """Places of the named tensors one after another, and the bytes in all.

    >>> places, total = layout(("S_border", "M"), Counts(8, 1, 0), HV=2, K=128, V=128)
    >>> [p.offset for p in places], total
    ([0, 131072], 131072)
    """
    places: list[Place] = []
    offset = 0
    for name in names:
        size = itemsize(name, dtype, backend)
        measured = shape(name, counts, HV, K, V, T=T, H=H)
        for extent in measured:
            size = size * extent
        places.append(Place(name, measured, offset, size))
        offset = offset + -(-size // _ALIGNMENT) * _ALIGNMENT
    return tuple(places), offset


def saved_bytes(
    save: str,
    counts: Counts,
    *,
    HV: int,
    K: int,
    V: int,
    dtype: str = "bfloat16",
    backend: str = "eager",
) -> int:
    """Bytes of the flat saved tensor. counts: exact, or, in a compiled graph, `capacity`.

    >>> saved_bytes("none", Counts(67, 8, 8), HV=6, K=128, V=128)
    0
    >>> saved_bytes("light", Counts(67, 8, 8), HV=6, K=128, V=128) - 2 * 8 * 6 * 128 * 128 * 4
    256
    """
    return layout(KEPT[save], counts, HV=HV, K=K, V=V, dtype=dtype, backend=backend)[1]


def workspace_bytes(
    counts: Counts,
    *,
    save: str,
    HV: int,
    K: int,
    V: int,
    T: int = 0,
    H: int = 0,
    activated: tuple[str, ...] = (),
    dtype: str = "bfloat16",
    backend: str = "eager",
) -> tuple[int, int]:
    """Bytes that a forward and a backward take besides the saved set.

    activated: names of ACTIVATED that a call makes, of T rows and H heads.

    >>> forward, backward = workspace_bytes(Counts(8, 0, 0), save="full", HV=2, K=128, V=128)
    >>> forward, backward == 8 * 2 * (128 * 128 + 64 * 128) * 4
    (0, True)
    """
    kept = KEPT[save]

    def total(names: tuple[str, ...]) -> int:
        rest = tuple(name for name in names if name not in kept)
        sizes = {"HV": HV, "K": K, "V": V, "T": T, "H": H}
        return layout(rest, counts, dtype=dtype, backend=backend, **sizes)[1]

    cotangents = tuple(x for name in activated for x in COTANGENTS[name])
    return total(activated + FORWARD), total(activated + BACKWARD + cotangents)
