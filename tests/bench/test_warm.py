"""What is compiled ahead: each arm on the rows that its kernels depend on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from longdelta.bench.baselines import Arm, all_arms
from longdelta.bench.rows import Row

ROWS = (Row("long", 2, 4, (900,)), Row("short", 2, 4, (64,)), Row("other", 1, 2, (64,)))
PATH = Path(__file__).parents[2] / "benchmarks" / "warm_peers.py"


def test_each_arm_runs_the_rows_its_kernels_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("warm_peers", PATH)
    assert spec is not None
    assert spec.loader is not None
    warm = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "warm_peers", warm)
    spec.loader.exec_module(warm)
    monkeypatch.setattr(Arm, "missing", lambda arm: "no" if arm.name == "attn_gym" else "")
    arms = [all_arms()[name] for name in ("ours", "fla", "attn_gym", "flash_qla")]
    assert [(job.arm.name, job.row.name) for job in warm.jobs_of(ROWS, arms)] == [
        ("flash_qla", "long"),
        ("flash_qla", "short"),
        ("flash_qla", "other"),
        ("ours", "short"),
        ("ours", "other"),
        ("fla", "long"),
        ("fla", "other"),
    ]
