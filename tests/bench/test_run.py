"""Options, the machine they need, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from longdelta.bench.problem import Place
from longdelta.bench.results import read_csv
from longdelta.bench.run import Options, Run, plan_of
from longdelta.bench.timing import FULL, QUICK, SMOKE
from longdelta.cli.main import app
from longdelta.errors import InvalidInput

from .scripted import CPU, SHORT, Scripted, arm, plan

GPU = Place(torch.device("cuda"))


def test_suite_without_a_gpu_offers_the_smoke_suite() -> None:
    with pytest.raises(
        InvalidInput, match="needs a GPU and there is none here; longdelta bench --s"
    ):
        plan_of(Options(suite="single"), CPU)


def test_cp_suite_on_one_rank_says_how_to_start_it() -> None:
    start = "torchrun --nproc-per-node 2 -m longdelta bench --suite seed"
    with pytest.raises(InvalidInput, match=f"needs 2 ranks; start it with {start}"):
        plan_of(Options(suite="seed"), GPU)


def test_one_rank_suite_on_two_ranks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="suite single runs on 1 rank"):
        plan_of(Options(suite="single"), Place(torch.device("cuda"), None, 0, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(suite="smoke", ops=("forward",)), "ops: 'forward' does not exist; there are fwd"),
        (
            Options(suite="smoke", modes=("graph",)),
            "modes: 'graph' does not exist; there are eager",
        ),
        (Options(suite="smoke", rows=("S26",)), "suite seed has it"),
        (Options(suite="smoke", arms=("flash",)), "there are ours"),
    ],
)
def test_unknown_name_is_told_what_exists(options: Options, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_of(options, CPU)


def test_plan_takes_everything_where_nothing_is_named(tmp_path: Path) -> None:
    found = plan_of(Options(suite="smoke", out=tmp_path, reverse=True), CPU)
    assert found.ops == ("fwd", "bwd", "fwdbwd", "checkpointed")
    assert found.modes == ("eager", "replay")
    assert [row.name for row in found.rows] == ["tiny", "packed", "long"]
    assert found.schedule is SMOKE
    assert (FULL.groups, QUICK.groups) == (5, 2)
    assert found.path.parent == tmp_path
    assert found.path.name.startswith("smoke-cpu-x1-")
    assert found.path.name.endswith("-reversed.csv")
    assert plan_of(Options(suite="smoke", commit="abc"), CPU).commit == "abc"


def test_progress_counts_every_step_of_the_plan(tmp_path: Path) -> None:
    given, seen = plan(tmp_path, arm("ours"), arm("other")), []
    Run(given, CPU, Scripted(), lambda text, steps: seen.append((text, steps))).all()
    assert sum(steps for _, steps in seen) == given.steps == 2 * (1 + 3 * SHORT.groups * 2)
    assert seen[0][0] == "row: first call of ours"


def test_command_runs_the_smoke_suite_and_writes_csv_page_and_plots(tmp_path: Path) -> None:
    words = ["bench", "--suite", "smoke", "--rows", "tiny", "--arms", "ours,ours_fast"]
    words += ["--ops", "fwd,bwd", "--modes", "eager", "--reverse", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.csv")
    records = read_csv(path)
    assert {(r.row, r.arm, r.op) for r in records} == {
        ("tiny", arm, op) for arm in ("ours", "ours_fast") for op in ("fwd", "bwd")
    }
    assert all(r.ms is not None and r.bits != "differ" for r in records)
    assert {r.order for r in records} == {"reversed"}
    assert (tmp_path / "report.md").exists()
    assert len(list(tmp_path.glob("*.png"))) == 3
    assert "tiny" in done.output


def test_command_names_missing_peers_and_reports_bad_options() -> None:
    done = CliRunner().invoke(app, ["bench", "--suite", "smoke", "--rows", "huge"])
    assert done.exit_code == 2
    assert "has no row" in done.output


def test_command_rebuilds_a_report_and_refuses_an_empty_folder(tmp_path: Path) -> None:
    empty = CliRunner().invoke(app, ["bench", "report", str(tmp_path)])
    assert empty.exit_code == 2
    Run(plan(tmp_path, arm("ours")), CPU, Scripted()).all()
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.md").exists()


def test_no_row_begins_after_the_given_minutes(tmp_path: Path) -> None:
    given = replace(plan(tmp_path, arm("ours")), minutes=0.0)
    assert Run(given, CPU, Scripted()).all() == []
