"""The rows that are measured: heads, documents, gates and seeds, by suite."""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from longdelta.errors import InvalidInput

GATES = ("mild", "model", "strong")
"""mild: logsigmoid(x) / 16. model: -A softplus(x + 1), A uniform to 16. strong: -6 a token."""


@dataclass(frozen=True)
class Row:
    """One packed batch.

    Attributes:
        H, HV, K, V: q/k heads, value heads, and their columns.
        lengths: tokens of each document.
        gates: one of `GATES`.
        seed: of the tensors (and of the lengths, where these are log-normal).
        layout: who holds which tokens, where there are several ranks.
        title: how the row is called in tables.
    """

    name: str
    H: int
    HV: int
    lengths: tuple[int, ...]
    gates: str = "model"
    seed: int = 0
    layout: str = "contiguous"
    K: int = 128
    V: int = 128
    title: str = ""

    @property
    def tokens(self) -> int:
        """T, all documents together."""
        return sum(self.lengths)

    @property
    def offsets(self) -> tuple[int, ...]:
        """cu_seqlens as integers."""
        return tuple(accumulate(self.lengths, initial=0))

    def __str__(self) -> str:
        documents = f"{len(self.lengths)} document" + ("s" if len(self.lengths) > 1 else "")
        name = self.title or self.name
        return f"{name}, ({self.H}, {self.HV}), {self.tokens:,} tokens in {documents}"


@dataclass(frozen=True)
class Suite:
    """Rows that are run together; `ranks` = 0: on any number."""

    name: str
    says: str
    rows: tuple[Row, ...]
    ranks: int = 0


def log_normal(tokens: int, documents: int, seed: int, sigma: float = 1.0) -> tuple[int, ...]:
    """Lengths of `documents` documents, log-normal, that add up to `tokens`; each at least one.

    >>> sum(log_normal(65536, 6, seed=1)), len(log_normal(65536, 6, seed=1))
    (65536, 6)
    """
    draw = random.Random(seed)
    weights = [draw.lognormvariate(0.0, sigma) for _ in range(documents)]
    spare, total = tokens - documents, sum(weights)
    marks = [round(spare * part / total) for part in accumulate(weights, initial=0.0)]
    return tuple(1 + stop - start for start, stop in pairwise(marks))


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _row(H: int, HV: int, tokens: int, documents: int, gates: str, equal: bool = False) -> Row:
    seed = 1000 + documents
    each, rest = divmod(tokens, documents)
    same = (each + 1,) * rest + (each,) * (documents - rest)
    lengths = same if equal or documents == 1 else log_normal(tokens, documents, seed)
    kind = "_equal" if equal and documents > 1 else ""
    name = f"{H}x{HV}_{_short(tokens)}_{documents}doc{kind}_{gates}"
    return Row(name, H, HV, lengths, gates, seed)


def _seed_rows() -> tuple[Row, ...]:
    det = log_normal(65_536, 6, seed=6)
    return (
        Row("S26", 2, 6, (2049, 3001, 3142), seed=26),
        Row("DET", 2, 6, det, seed=6),
        Row("DET_D", 2, 6, det, seed=6, layout="zigzag_per_document"),
        Row("P1", 16, 48, log_normal(241_817, 24, seed=24), seed=24),
        Row("P3", 16, 48, log_normal(259_174, 40, seed=40), seed=40),
    )


HEADS = ((16, 16), (16, 32), (16, 48), (16, 64), (8, 24), (4, 16), (2, 8), (2, 4))
"""Whole and tensor-parallel (H, HV) of the Qwen3.5 models."""
_K = 1024
_SINGLE = (
    (16, 16, 8 * _K, 1, "model"),
    (16, 16, 64 * _K, 16, "model"),
    (16, 32, 2 * _K, 1, "model"),
    (16, 32, 8 * _K, 1, "model"),
    (16, 32, 8 * _K, 4, "mild"),
    (16, 32, 32 * _K, 1, "model"),
    (16, 32, 32 * _K, 1, "strong"),
    (16, 32, 32 * _K, 8, "model"),
    (16, 32, 128 * _K, 1, "model"),
    (16, 32, 128 * _K, 64, "model"),
    (16, 48, 8 * _K, 1, "model"),
    (16, 48, 32 * _K, 1, "model"),
    (16, 48, 128 * _K, 12, "model"),
    (16, 64, 4 * _K, 1, "model"),
    (16, 64, 32 * _K, 4, "model"),
    (16, 64, 64 * _K, 1, "mild"),
    (8, 24, 32 * _K, 1, "model"),
    (4, 16, 32 * _K, 1, "model"),
    (4, 16, 64 * _K, 8, "mild"),
    (2, 8, 8 * _K, 1, "model"),
    (2, 8, 64 * _K, 1, "model"),
    (2, 4, 32 * _K, 1, "strong"),
)


def _single_rows() -> tuple[Row, ...]:
    rows = [_row(*each) for each in _SINGLE]
    rows.append(_row(16, 48, 32 * _K, 8, "mild", equal=True))
    rows.append(_row(16, 32, 2050 * 16, 2050, "mild", equal=True))
    return tuple(rows)


def _training_rows() -> tuple[Row, ...]:
    shapes = ((16, 16, 32), (16, 32, 32), (16, 32, 128), (16, 48, 128), (16, 64, 64))
    return tuple(_row(H, HV, size * _K, 2 * size // 4, "model") for H, HV, size in shapes)


def _sweep_rows() -> tuple[Row, ...]:
    return tuple(
        _row(H, HV, tokens * _K, documents, gates)
        for H, HV in HEADS
        for tokens in (2, 4, 8, 16, 32, 64, 128)
        for documents in (1, 4, 16, 64)
        for gates in GATES
    )


def _smoke_rows() -> tuple[Row, ...]:
    return (
        Row("tiny", 1, 2, (100, 1, 59), "mild", seed=1, K=32, V=32),
        Row("packed", 2, 4, log_normal(384, 3, seed=3), "model", seed=3, K=32, V=32),
        Row("long", 1, 2, (640,), "model", seed=2, K=32, V=32),
    )


SUITES = {
    suite.name: suite
    for suite in (
        Suite("seed", "the rows of the seed's table", _seed_rows(), ranks=2),
        Suite("single", "what users run on one GPU", _single_rows(), ranks=1),
        Suite("training", "packed training batches", _training_rows()),
        Suite("sweep", "heads x tokens x documents x gates", _sweep_rows(), ranks=1),
        Suite("smoke", "the whole harness in seconds, also on a CPU", _smoke_rows()),
    )
}


def suite_named(name: str) -> Suite:
    """The suite of this name.

    Raises:
        InvalidInput: none has it; lists those that exist.
    """
    if name not in SUITES:
        listed = "; ".join(f"{suite.name}: {suite.says}" for suite in SUITES.values())
        raise InvalidInput(f"suite must be one of those that exist, got {name!r}. {listed}")
    return SUITES[name]


def chosen_rows(suite: Suite, names: Sequence[str]) -> tuple[Row, ...]:
    """The named rows of a suite, in the order of the names; all of them for no name.

    Raises:
        InvalidInput: a row is not in the suite; lists its rows, or the suite that has it.
    """
    rows = {row.name: row for row in suite.rows}
    for name in names:
        if name not in rows:
            raise InvalidInput(_unknown_row(suite, name))
    return tuple(rows[name] for name in names) or suite.rows


def _unknown_row(suite: Suite, name: str) -> str:
    known = [row.name for row in suite.rows]
    shown = ", ".join(known) if len(known) <= 30 else ", ".join(known[:30]) + ", ..."
    elsewhere = [s.name for s in SUITES.values() if name in {row.name for row in s.rows}]
    hint = f", suite {elsewhere[0]} has it" if elsewhere else ""
    near = difflib.get_close_matches(name, known, n=1)
    hint += f" (did you mean {near[0]}?)" if near else ""
    return f"rows: suite {suite.name} has no row {name!r}{hint}; the rows of {suite.name}: {shown}"
