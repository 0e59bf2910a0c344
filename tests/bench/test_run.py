"""Options, the machine they need, and the command."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from longdelta.bench import accuracy, baselines
from longdelta.bench.contest import Contest
from longdelta.bench.problem import Place
from longdelta.bench.results import read_csv
from longdelta.bench.run import Options, Run, plan_of
from longdelta.bench.timing import FULL, QUICK, SMOKE
from longdelta.cli.bench import results_folder, show
from longdelta.cli.main import app
from longdelta.errors import InvalidInput

from .scripted import CPU, ROW, SHORT, Scripted, arm, plan

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
        (Options(suite="smoke", modes=("eager", "replay")), "replay times CUDA graphs, which need"),
        (Options(suite="smoke", minutes=-1), "minutes must be above 0, got -1"),
        (Options(suite="smoke", minutes=0.0), "minutes must be above 0, got 0"),
        (Options(suite="smoke", minutes=float("nan")), "minutes must be above 0, got nan"),
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
    assert found.modes == ("eager",)
    assert [row.name for row in found.rows] == ["tiny", "packed", "long"]
    assert found.schedule is SMOKE
    assert (FULL.groups, QUICK.groups) == (5, 2)
    assert found.path.parent == tmp_path
    assert found.path.name.startswith("smoke-cpu-x1-")
    assert found.path.name.endswith("-reversed.csv")
    assert plan_of(Options(suite="smoke", commit="abc"), CPU).commit == "abc"


def test_progress_counts_every_step_of_the_plan(tmp_path: Path) -> None:
    given, seen = plan(tmp_path, arm("ours"), arm("other")), []
    Run(given, CPU, Scripted(), lambda *told: seen.append(told)).all()
    assert sum(steps for *_, steps in seen) == given.steps == 2 * (1 + 3 * SHORT.groups * 2)
    assert seen[0] == (ROW, "first call of ours", 1)


def test_command_runs_the_smoke_suite_and_writes_csv_page_and_plots(tmp_path: Path) -> None:
    words = ["bench", "--suite", "smoke", "--rows", "tiny", "--arms", "ours,ours_fast"]
    words += ["--ops", "fwd,bwd", "--modes", "eager", "--reverse", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    log = [line for line in done.output.splitlines() if " row 1 of 1: " in line]
    assert [line.partition(": ")[2] for line in log] == ["tiny, (1, 2), 160 tokens in 3 documents"]
    assert "first call" not in done.output
    (path,) = tmp_path.glob("*.csv")
    records = read_csv(path)
    assert {(r.row, r.arm, r.op) for r in records} == {
        ("tiny", arm, op) for arm in ("ours", "ours_fast") for op in ("fwd", "bwd")
    }
    assert all(r.ms is not None and r.bits != "differ" for r in records)
    assert {r.order for r in records} == {"reversed"}
    assert (tmp_path / "report.md").exists()
    assert len(list(tmp_path.glob("*.png"))) == 3
    assert "smoke on CPU (1 thread) x 1" in done.output
    assert f"wrote {path} and {tmp_path / 'report.md'} with 3 plots" in done.output
    assert "CPU (1 thread) x 1" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_command_prints_the_speed_up_over_base(tmp_path: Path) -> None:
    ms = {"ours": 2.0, "base": 3.0}
    timer = Scripted(lambda slot: ms.get(slot.arm, 1.0))
    records = Run(plan(tmp_path, arm("ours"), arm("base")), CPU, timer).all()
    console = Console(file=io.StringIO(), width=80, record=True)
    show(records, "eager", console)
    lines = [line.split() for line in console.export_text().splitlines()]
    at = lines.index(["eager,", "speed-up", "over", "base"])
    assert ["row", "1.500", "-", "1.500", "1.500"] in lines[at:]


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
    given = replace(plan(tmp_path, arm("ours")), minutes=1e-9)
    assert Run(given, CPU, Scripted()).all() == []
    assert not list(tmp_path.iterdir())


def smoke(folder: Path, *words: str) -> Result:
    given = ["bench", "--suite", "smoke", "--rows", "tiny", "--ops", "fwd", "--out", str(folder)]
    return CliRunner().invoke(app, [*given, *words])


def test_command_that_measures_nothing_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = smoke(tmp_path, "--minutes", "1e-9")
    assert late.exit_code == 1
    assert late.output.splitlines()[-1].startswith("Nothing was measured: no row began within")
    monkeypatch.setattr(baselines.Arm, "missing", lambda self: "not installed: pip install it")
    absent = smoke(tmp_path, "--arms", "fla")
    assert absent.exit_code == 2
    assert "nothing can be measured: fla is not installed" in " ".join(absent.output.split())
    monkeypatch.undo()

    def wrong(*_: object) -> str:
        return "wrong"

    monkeypatch.setattr(accuracy, "verdict", wrong)
    failed = smoke(tmp_path, "--arms", "ours")
    assert failed.exit_code == 1
    assert "ArithmeticError: wrong" in failed.output
    assert "Nothing was measured; no results were written." in failed.output
    assert not list(tmp_path.iterdir())


def test_interrupted_command_keeps_what_was_measured_and_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Contest, *_: object) -> None:
        time(self, ("fwd",), "eager", False)
        raise KeyboardInterrupt

    time = Contest.time
    monkeypatch.setattr(Contest, "time", interrupted)
    done = smoke(tmp_path, "--arms", "ours")
    assert done.exit_code == 130
    (path,) = tmp_path.glob("*.csv")
    assert [(r.op, len(r.groups_ms), r.note) for r in read_csv(path)] == [
        ("fwd", 3, "(interrupted)")
    ]


def test_results_go_into_a_folder_of_their_own_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert results_folder() == Path("bench-results")
    Path("benchmarks/results").mkdir(parents=True)
    assert results_folder() == results_folder("single") == Path("benchmarks/results")
    assert results_folder("smoke") == Path("bench-results")
