"""Accuracy of the forward on a GPU, beside the peers that are installed, and a thousand repeats.

Errors are relative L2 against the chunked rule in float64 on the same inputs, medians of 5 seeds.

python benchmarks/accuracy.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from longdelta import chunk_gated_delta_rule
from longdelta.bench.baselines import fla_op, flash_qla_op
from longdelta.testing.budgets import relative_l2

H, HV, D = 2, 8, 128
LENGTHS = (333, 179, 512, 2048, 1)
SEEDS = range(5)
REPEATS = 1000
PEERS = {"FLA": fla_op, "FlashQLA": flash_qla_op}
"""Loads each; FLA's without the hand-over to FlashQLA that it makes where both are installed."""
INPUTS = {
    "mild": "g = logsigmoid(x) / 16",
    "model": "g = -A softplus(x + dt_bias), A to 16",
    "extreme": "g = -87 at every 61st token, mild elsewhere",
    "strong": "g = -20 at every token",
    "correlated": "mild; k = normalised(mean + 0.3 noise), beta near 1",
    "beta to 2": "mild; beta in (0, 2)",
    "both": "mild; correlated keys and beta in (0, 2)",
}

Op = Callable[..., Any]


def gates(kind: str, T: int, device: torch.device) -> Tensor:
    x = torch.randn(1, T, HV, device=device)
    if kind == "model":
        rate = torch.empty(HV, device=device).uniform_(0, 16)
        return -rate * softplus(x + torch.empty(HV, device=device).uniform_(-6, -2))
    if kind == "strong":
        return torch.full_like(x, -20)
    g = logsigmoid(x) / 16
    if kind == "extreme":
        g[:, 7::61] = -87
    return g


def problem(kind: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Arguments of the op, by keyword."""
    torch.manual_seed(seed)
    T, correlated = sum(LENGTHS), kind in ("correlated", "both")
    k = torch.randn(1, T, H, D, device=device)
    if correlated:
        mean = torch.randn(1, 1, H, D, device=device)
        k = mean + 0.3 * k
    beta = torch.randn(1, T, HV, device=device) + (4 if correlated else 0)
    starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    return {
        "q": normalize(torch.randn(1, T, H, D, device=device), dim=-1).bfloat16(),
        "k": normalize(k, dim=-1).bfloat16(),
        "v": torch.randn(1, T, HV, D, device=device).bfloat16(),
        "g": gates(kind, T, device),
        "beta": beta.sigmoid() * (2 if kind in ("beta to 2", "both") else 1),
        "scale": D**-0.5,
        "initial_state": torch.randn(len(LENGTHS), HV, D, D, device=device),
        "output_final_state": True,
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32, device=device),
    }


def in_float64(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """o and final_state of the rule in float64, a document at a time."""
    wide = {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
            for n, t in x.items()}  # fmt: skip
    starts = wide.pop("cu_seqlens").tolist()
    states, o, final = wide.pop("initial_state"), [], []
    for n, (start, stop) in enumerate(pairwise(starts)):
        cut = {m: t[:, start:stop] if isinstance(t, Tensor) else t for m, t in wide.items()}
        part = chunk_gated_delta_rule(**cut, initial_state=states[n : n + 1], backend="eager")
        o.append(part[0])
        final.append(part[1])
    return torch.cat(o, 1), torch.cat(final)


def ours(deterministic: bool) -> Op:
    return lambda **x: chunk_gated_delta_rule(**x, deterministic=deterministic)


def arms() -> dict[str, Op]:
    found: dict[str, Op] = {"ours": ours(True), "ours_fast": ours(False)}
    for name, load in PEERS.items():
        try:
            found[name] = load()
        except ImportError:
            print(f"{name} is not installed")
    return found


@torch.no_grad()
def main() -> None:
    device, found = torch.device("cuda" if torch.cuda.is_available() else "cpu"), arms()
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for kind, seed in track(list(product(INPUTS, SEEDS)), "accuracy"):
        x = problem(kind, seed, device)
        o, final = in_float64(x)
        for name, run in found.items():
            got = run(**x)
            error = relative_l2(got[0], o), relative_l2(got[1], final)
            errors.setdefault((kind, name), []).append(error)
    table = Table("input", *found, title="relative L2 of o, final_state: medians of 5 seeds")
    for kind in INPUTS:
        cells = [
            ", ".join(f"{statistics.median(e):.1e}" for e in zip(*errors[kind, name], strict=True))
            for name in found
        ]
        table.add_row(f"{kind}: {INPUTS[kind]}", *cells)
    Console(width=160).print(table)

    x = problem("mild", 0, device)
    first = found["ours"](**x)
    different = 0
    for _ in track(range(REPEATS), "repeats"):
        again = found["ours"](**x)
        different += not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    print(f"{REPEATS} repeats of the same call, {different} with other bits")


if __name__ == "__main__":
    main()
