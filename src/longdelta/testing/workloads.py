"""Named inputs with fixed seeds, what the reference makes of them, and what the op does.

A `Workload` is a hashable description; `Workload.inputs` makes its packed tensors in any dtype on
any device, `expected` is the token recurrence in float64 on exactly those (rounded) tensors, and
`evaluate` runs the public op with autograd. Both return `Results`, which `assert_results` compares
within the budgets and `assert_bitwise` bit by bit. A `Machine` does the same for one backend on one
device, with the workload brought to the dims and the dtype that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdelta import reference
from longdelta.api import chunk_gated_delta_rule
from longdelta.testing.budgets import (
    EAGER,
    HOPPER,
    HOPPER_LARGE_INVERSE,
    HOPPER_REFLECTIONS,
    Budgets,
    assert_within,
    budget,
)


@dataclass(frozen=True)
class Inputs:
    """Packed inputs of one call: q, k [1, T, H, K], v [1, T, HV, V], g, beta [1, T, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    def with_(self, **changes: Any) -> Inputs:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def to(self, device: str | torch.device) -> Inputs:
        """The same on another device."""
        held: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in held.items() if x is not None})


class Cotangents(NamedTuple):
    """do [1, T, HV, V] and d_final_state [N, HV, K, V]; None: that output is not used."""

    do: Tensor | None
    d_final_state: Tensor | None

    def to(self, device: str | torch.device) -> Cotangents:
        """The same on another device."""
        return Cotangents(*(x if x is None else x.to(device) for x in self))


class Results(NamedTuple):
    """Outputs and gradients of one call; None where there is none."""

    o: Tensor
    final_state: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dg: Tensor | None
    dbeta: Tensor | None
    d_initial_state: Tensor | None


@dataclass(frozen=True)
class Workload:
    """Documents, gates, betas, keys, heads and dims of a set of inputs.

    gates: "mild" (logsigmoid(randn) / 16), "slow" (a 32nd of that), "model" (-A softplus(a + 1), A
    uniform to 16), "reset" (mild, with -inf at some tokens) or a number for every token. betas:
    "sigmoid", "small" (0.04 sigmoid), "up_to_two" (a quarter of them zero), "near_two"
    (2 sigmoid(3 + randn)) or a number. keys: "random", "correlated" (a common direction and 0.3 of
    a random one), "nearly_equal" (and 0.1) or "raw" (about sqrt(K) long). tail: rows after the last
    document.
    """

    lengths: tuple[int, ...] = (37, 0, 130, 1, 64)
    gates: str | float = "mild"
    betas: str | float = "sigmoid"
    keys: str = "random"
    H: int = 2
    HV: int = 4
    K: int = 8
    V: int = 12
    tail: int = 5
    initial: bool = True
    seed: int = 0

    @property
    def offsets(self) -> tuple[int, ...]:
        """cu_seqlens as integers."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def rows(self) -> int:
        """T."""
        return self.offsets[-1] + self.tail

    @property
    def scale(self) -> float:
        """The op's default."""
        return float(self.K**-0.5)

    @property
    def hopper_budgets(self) -> Budgets:
        """By how large the inverses of its chunks are, and how long errors live."""
        if self.betas in ("near_two", 2.0):
            return HOPPER_REFLECTIONS
        large = self.keys != "random" or self.betas == "up_to_two"
        return HOPPER_LARGE_INVERSE if large else HOPPER

    def inputs(
        self, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu"
    ) -> Inputs:
        """New tensors, in `dtype`; g, beta and the state in float32 where it has 16 bits."""
        x = _tensors(self)
        wide = dtype if dtype == torch.float64 else torch.float32

        def fresh(y: Tensor, dtype: torch.dtype) -> Tensor:
            return y.to(device, dtype, copy=True)

        q, k, v = (fresh(y, dtype) for y in (x.q, x.k, x.v))
        g, beta = fresh(x.g, wide), fresh(x.beta, wide)
        state = None if x.initial_state is None else fresh(x.initial_state, wide)
        offsets = torch.tensor(self.offsets, dtype=torch.int32, device=device)
        return Inputs(q, k, v, g, beta, state, offsets)

    def cotangents(
        self, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu"
    ) -> Cotangents:
        """Cotangents of o in `dtype` and of final_state in its compute dtype."""
        random = torch.Generator().manual_seed(self.seed + 1)
        shape = (len(self.lengths), self.HV, self.K, self.V)
        do = torch.randn(1, self.rows, self.HV, self.V, generator=random, dtype=torch.float64)
        state = torch.randn(shape, generator=random, dtype=torch.float64)
        wide = dtype if dtype == torch.float64 else torch.float32
        return Cotangents(do.to(device, dtype), state.to(device, wide))


_LONG = Workload(lengths=(1100, 70, 600), gates="slow", betas="small", HV=2, tail=3, K=8, V=8)
"""Forgets slowly, so that what crosses a border still counts at the next one."""

NAMED = {
    "mild": Workload(),
    "model": Workload(gates="model"),
    "no_decay": Workload(gates=0.0),
    "strong_6": Workload(gates=-6.0),
    "strong_20": Workload(gates=-20.0),
    "strong_120": Workload(gates=-120.0),
    "reset": Workload(gates="reset"),
    "beta_zero": Workload(betas=0.0),
    "beta_one": Workload(betas=1.0),
    "beta_up_to_two": Workload(betas="up_to_two", gates=-1e-3),
    "correlated_keys": Workload(keys="correlated", betas=1.0, gates=-1e-3),
    "nearly_equal_keys": Workload(keys="nearly_equal", betas=1.0, gates=-1e-3),
    "groups_of_one": Workload(HV=2, K=16, V=16),
    "groups_of_three": Workload(HV=6, K=20, V=7),
    "one_chunk": Workload(lengths=(64,), tail=0),
    "ragged_tails": Workload(lengths=(65, 79, 127), tail=0),
    "split_documents": _LONG,
    "split_model": replace(_LONG, gates="model", betas="sigmoid"),
    "split_reflections": replace(_LONG, betas=2.0, K=12, V=20),
    "split_groups": replace(_LONG, H=1, HV=3, K=16, V=5),
    "split_reset": replace(_LONG, gates="reset", betas="up_to_two"),
}
"""Small workloads by name; in the split ones documents have several segments, and middle ones."""


def _gates(work: Workload, normal: Any, random: torch.Generator) -> Tensor:
    if not isinstance(work.gates, str):
        return torch.full((1, work.rows, work.HV), work.gates, dtype=torch.float64)
    steps = normal(1, work.rows, work.HV)
    if work.gates == "model":
        rate = 16 * torch.rand(work.HV, generator=random, dtype=torch.float64)
        return -rate * torch.logaddexp(0.5 * steps + 1, torch.zeros_like(steps))
    g = torch.nn.functional.logsigmoid(steps) / (512 if work.gates == "slow" else 16)
    if work.gates == "reset":
        g[:, 11::23] = -math.inf
        g[:, 40::61, 0] = -math.inf
    return g


def _betas(work: Workload, normal: Any) -> Tensor:
    if not isinstance(work.betas, str):
        return torch.full((1, work.rows, work.HV), work.betas, dtype=torch.float64)
    beta: Tensor = normal(1, work.rows, work.HV).sigmoid()
    if work.betas == "small":
        beta = 0.04 * beta
    if work.betas == "up_to_two":
        beta = 2 * beta
        beta[:, ::7] = 2.0
        beta[:, 1::4] = 0.0
    if work.betas == "near_two":
        beta = 2 * torch.sigmoid(3 + beta.logit())
    return beta


@lru_cache(maxsize=256)
def _tensors(work: Workload) -> Inputs:
    """Float64 tensors of a workload; shared, so never written."""
    random = torch.Generator().manual_seed(work.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    T, N = work.rows, len(work.lengths)
    q, k = normal(1, T, work.H, work.K), normal(1, T, work.H, work.K)
    spread = {"correlated": 0.3, "nearly_equal": 0.1}.get(work.keys)
    if spread is not None:
        k = normal(1, 1, work.H, work.K) + spread * k
    q = q / q.norm(dim=-1, keepdim=True)
    if work.keys != "raw":
        k = k / k.norm(dim=-1, keepdim=True)
    v, state = normal(1, T, work.HV, work.V), normal(N, work.HV, work.K, work.V)
    g, beta = _gates(work, normal, random), _betas(work, normal)
    return Inputs(q, k, v, g, beta, state if work.initial else None, None)


def reference_results(
    inputs: Inputs, cotangents: Cotangents, *, scale: float, offsets: Sequence[int]
) -> Results:
    """The token recurrence and its adjoint in float64 on packed inputs."""
    packed = [x[0].cpu() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)]
    state = None if inputs.initial_state is None else inputs.initial_state.cpu()
    common: dict[str, Any] = {"scale": scale, "initial_state": state, "cu_seqlens": offsets}
    outputs = reference.recurrence(*packed, **common)
    do, d_state = cotangents
    found = reference.recurrence_gradients(
        *packed,
        **common,
        do=torch.zeros_like(outputs.o) if do is None else do[0].cpu(),
        d_final_state=None if d_state is None else d_state.cpu(),
    )
    return Results(
        outputs.o[None],
        outputs.final_state,
        dq=found.dq[None],
        dk=found.dk[None],
        dv=found.dv[None],
        dg=found.dg[None],
        dbeta=found.dbeta[None],
        d_initial_state=None if state is None else found.d_initial_state,
    )


@lru_cache(maxsize=256)
def expected(work: Workload, dtype: torch.dtype = torch.float64) -> Results:
    """`reference_results` of a workload whose tensors are rounded to `dtype`; computed once."""
    inputs, cotangents = work.inputs(dtype), work.cotangents(dtype)
    return reference_results(inputs, cotangents, scale=work.scale, offsets=work.offsets)


LEAVES = ("q", "k", "v", "g", "beta", "initial_state")


def evaluate(
    inputs: Inputs,
    cotangents: Cotangents,
    *,
    leaves: Sequence[str] = LEAVES,
    **options: Any,
) -> Results:
    """The op on these inputs, and by autograd the gradients of `leaves`; None for the rest."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    for name in leaves:
        if given[name] is not None:
            given[name] = given[name].detach().requires_grad_()
    chosen = [given[name] for name in leaves if given[name] is not None]
    options = {"output_final_state": True} | options
    o, final_state = chunk_gated_delta_rule(**given, **options)
    pairs = [
        (x, dx)
        for x, dx in ((o, cotangents.do), (final_state, cotangents.d_final_state))
        if x is not None and dx is not None
    ]
    found = iter(
        torch.autograd.grad([x for x, _ in pairs], chosen, [dx for _, dx in pairs])
        if chosen and pairs
        else ()
    )
    gradients = [
        next(found) if pairs and name in leaves and given[name] is not None else None
        for name in LEAVES
    ]
    state = None if final_state is None else final_state.detach()
    return Results(o.detach(), state, *gradients)


def assert_results(
    out: Results,
    ref: Results,
    budgets: Budgets = EAGER,
    scale: Results | None = None,
    vanishing: Sequence[str] = (),
) -> None:
    """Every result within its budget.

    Those named `vanishing` are compared relative to their size in `scale`, a run where they do not
    vanish.
    """
    for name, x, y in zip(Results._fields, out, ref, strict=True):
        if x is None:
            continue
        assert y is not None, f"{name} has no reference"
        size = getattr(scale, name) if name in vanishing else None
        assert_within(name, x, y, budget(budgets, name, x.dtype), size)


def assert_bitwise(out: Results, ref: Results) -> None:
    """Every result of `out` has the bits of its counterpart; None is not compared."""
    for name, x, y in zip(Results._fields, out, ref, strict=True):
        if x is None or y is None:
            continue
        assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{name}: other dtype or shape"
        same = torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        assert same, f"{name}: bits differ, largest difference {(x - y).abs().max().item():.3e}"


class Machine(NamedTuple):
    """A backend on a device; it fits a workload to the dims and the dtype that it takes."""

    backend: str
    device: str

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def takes_any_dims(self) -> bool:
        """Otherwise bfloat16 and K = V = 128 alone, as the Hopper kernels."""
        return self.backend != "gluon"

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """This dtype, or the one that it takes."""
        return dtype if self.takes_any_dims else torch.bfloat16

    def fit(self, work: Workload) -> Workload:
        """The workload in dims that it takes."""
        return work if self.takes_any_dims else replace(work, K=128, V=128)

    def budgets(self, work: Workload) -> Budgets:
        """Of the results for this workload."""
        return EAGER if self.backend == "eager" else work.hopper_budgets

    def inputs(self, work: Workload, dtype: torch.dtype = torch.float32) -> Inputs:
        """`Workload.inputs`, fitted."""
        return self.fit(work).inputs(self.dtype(dtype), self.device)

    def cotangents(self, work: Workload, dtype: torch.dtype = torch.float32) -> Cotangents:
        """`Workload.cotangents`, fitted."""
        return self.fit(work).cotangents(self.dtype(dtype), self.device)

    def expected(self, work: Workload, dtype: torch.dtype = torch.float32) -> Results:
        """`expected` of the fitted workload."""
        return expected(self.fit(work), self.dtype(dtype))

    def evaluate(self, inputs: Inputs, cotangents: Cotangents, **options: Any) -> Results:
        """`evaluate` here, wherever the tensors come from."""
        moved = inputs.to(self.device), cotangents.to(self.device)
        return evaluate(*moved, backend=self.backend, **options)

    def run(self, work: Workload, dtype: torch.dtype = torch.float32, **options: Any) -> Results:
        """`evaluate` of the fitted workload."""
        return self.evaluate(self.inputs(work, dtype), self.cotangents(work, dtype), **options)


MACHINES = (Machine("eager", "cpu"), Machine("eager", "cuda"), Machine("gluon", "cuda"))
"""Where the same tests run."""

BITS_BY_DOCUMENT = (Machine("eager", "cpu"), Machine("gluon", "cuda"))
"""Where a document's bits depend on the document alone: docs/design/determinism.md."""
