"""What is compiled ahead: each arm on the rows that its kernels depend on."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from longdelta.bench.baselines import Arm, all_arms
from longdelta.bench.rows import Row

ROWS = (Row("long", 2, 4, (900,)), Row("short", 2, 4, (64,)), Row("other", 1, 2, (64,)))
PATH = Path(__file__).parents[2] / "benchmarks" / "warm_peers.py"


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("warm_peers", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "warm_peers", module)
    spec.loader.exec_module(module)
    return module


def kernel(cache: Path, key: str, size: int) -> None:
    """An entry of Triton's cache, used by a job of that name."""
    for folder in ("used", f"triton/{key}"):
        (cache / folder).mkdir(parents=True, exist_ok=True)
    (cache / "triton" / key / "kernel.cubin").write_bytes(os.urandom(size))
    (cache / "used" / key).write_text(f"{key}\n")


def unpacked(parts: Path, cache: Path) -> list[str]:
    cache.mkdir()
    line = f"cat '{parts}'/caches.tar.xz.* | tar -C '{cache}' -xJf -"
    subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True)
    return sorted(path.parent.name for path in cache.glob("triton/*/*.cubin"))


def test_a_pack_replaces_the_one_before_and_keeps_what_that_one_held(
    warm: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(warm, "PART_BYTES", 1 << 12)
    first, second, parts = tmp_path / "first", tmp_path / "second", tmp_path / "parts"
    kernel(first, "a", 20_000)
    kernel(first, "b", 20_000)
    warm.pack(first, parts, True)
    assert unpacked(parts, second) == ["a", "b"]
    (second / "triton" / "a" / "kernel.cubin").unlink()
    kernel(second, "c", 100)
    warm.pack(second, parts, True)
    assert unpacked(parts, tmp_path / "third") == ["b", "c"]


def test_each_arm_runs_the_rows_its_kernels_depend_on(
    warm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("op", ["fwd", "fwdbwd"])
def test_workers_run_the_operation_that_was_asked_for(
    warm: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: str
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(warm.subprocess, "Popen", lambda command, **_: commands.append(command))
    (tmp_path / "logs").mkdir()
    arm = next(iter(all_arms().values()))
    options = argparse.Namespace(cache=tmp_path, ranks=1, suite="single", op=op)
    warm.start(warm.Job(arm, ROWS[0]), options, 29600)
    (command,) = commands
    assert command[command.index("--op") + 1] == op
