"""The rows: the seed's, the user's twenty-four, and what an unknown name is told."""

from __future__ import annotations

import pytest
import torch

from longdelta.bench.problem import problem_of
from longdelta.bench.rows import GATES, HEADS, SUITES, chosen_rows, log_normal, suite_named
from longdelta.errors import InvalidInput

from .scripted import CPU, ROW


def test_seed_suite_has_the_seeds_heads_tokens_and_documents() -> None:
    found = {r.name: (r.H, r.HV, r.tokens, len(r.lengths)) for r in SUITES["seed"].rows}
    assert found["S26"] == (2, 6, 8_192, 3)
    assert found["DET"] == found["DET_D"] == (2, 6, 65_536, 6)
    assert found["P1"] == (16, 48, 241_817, 24)
    assert found["P3"] == (16, 48, 259_174, 40)
    assert {r.name: r.layout for r in SUITES["seed"].rows}["DET_D"] == "zigzag_per_document"
    assert SUITES["seed"].ranks == 2


def test_single_suite_covers_heads_gates_and_sizes_in_at_most_24_rows() -> None:
    rows = SUITES["single"].rows
    assert len(rows) <= 24
    assert {(r.H, r.HV) for r in rows} == set(HEADS)
    assert {r.gates for r in rows} == set(GATES)
    assert (min(r.tokens for r in rows), max(r.tokens for r in rows)) == (2_048, 131_072)
    assert any(r.lengths == (16,) * 2050 for r in rows)


def test_sweep_suite_is_the_product() -> None:
    assert len(SUITES["sweep"].rows) == len(HEADS) * 7 * 4 * len(GATES)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_suite_names_each_row_once_and_gives_every_document_a_token(suite: object) -> None:
    rows = suite.rows  # type: ignore[attr-defined]
    assert len({r.name for r in rows}) == len(rows)
    assert min(min(r.lengths) for r in rows) >= 1


def test_log_normal_lengths_repeat_with_the_seed_and_differ_without() -> None:
    assert log_normal(65_536, 6, 6) == log_normal(65_536, 6, 6)
    assert log_normal(65_536, 6, 6) != log_normal(65_536, 6, 7)
    assert sum(log_normal(1_001, 40, 3)) == 1_001


def test_problem_repeats_with_the_seed_and_has_unit_keys_and_negative_gates() -> None:
    first, again = problem_of(ROW, CPU), problem_of(ROW, CPU)
    assert all(torch.equal(a, b) for a, b in zip(first.inputs, again.inputs, strict=True))
    q, k, v, g, beta = first.inputs
    assert q.shape == k.shape == (1, 91, 1, 8)
    assert v.shape == first.do.shape == (1, 91, 2, 8)
    assert torch.equal((k.norm(dim=-1) - 1).abs() < 1e-6, torch.ones(1, 91, 1, dtype=torch.bool))
    assert g.max() < 0
    assert 0 < beta.min() < beta.max() < 1


def test_unknown_row_is_told_what_exists_and_where() -> None:
    with pytest.raises(
        InvalidInput, match=r"no row 'S62' \(did you mean S26\?\); the rows of seed: S26, DET"
    ):
        chosen_rows(SUITES["seed"], ["S62"])
    with pytest.raises(
        InvalidInput, match="no row 'P1', suite seed has it; the rows of smoke: tiny"
    ):
        chosen_rows(SUITES["smoke"], ["P1"])


def test_unknown_suite_is_told_what_exists() -> None:
    with pytest.raises(InvalidInput, match="seed: the rows of the seed's table; single"):
        suite_named("sed")


def test_chosen_rows_come_in_the_order_of_the_names() -> None:
    assert [r.name for r in chosen_rows(SUITES["seed"], ["P3", "S26"])] == ["P3", "S26"]
