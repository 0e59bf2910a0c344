"""The commands pass their options on, exit with the right code, and start quickly."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import longdelta
from longdelta.cli import demo as demo_module
from longdelta.cli.demo import Comparison, DemoOptions, DemoResult
from longdelta.cli.main import app

SOURCE = Path(__file__).resolve().parents[2] / "src"


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code, and the output in one line of words."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "400", "TERM": "dumb"})
    return result.exit_code, " ".join(result.output.split())


def test_demo_command_hands_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoOptions] = []

    def record(options: DemoOptions) -> DemoResult:
        seen.append(options)
        return DemoResult((1.0,), 2.0, 0.0, "", ())

    monkeypatch.setattr(demo_module, "run_demo", record)
    given = (
        "demo --text a --steps 7 --seed 3 --device cpu --threads 2 --plot b.png "
        "--ranks 3 --layout balanced --align segment"
    )
    assert invoke(*given.split())[0] == 0
    assert invoke("demo")[0] == 0
    chosen = DemoOptions(Path("a"), 7, 3, "cpu", 2, Path("b.png"), 3, "balanced", "segment")
    assert seen == [chosen, DemoOptions()]


def test_demo_command_exits_with_one_where_a_gradient_is_out_of_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = DemoResult((1.0,), 2.0, 0.0, "", (Comparison("dg", 2.0, 1.0),))
    monkeypatch.setattr(demo_module, "run_demo", lambda _: result)
    assert invoke("demo")[0] == 1


def test_demo_command_trains_on_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "STEP_TOKENS", 64)
    monkeypatch.setattr(demo_module, "SAMPLE_BYTES", 4)
    text = tmp_path / "text.md"
    text.write_bytes(b"# Gated delta rule\n" * 30)
    code, output = invoke(
        "demo", "--text", str(text), "--steps", "2", "--device", "cpu", "--ranks", "1"
    )
    assert code == 0
    assert "text.md: 570 bytes" in output
    assert "2 steps of 64 bytes" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--text", "no-such-file"], "text must be a readable file, got no-such-file"),
        (["demo", "--device", "abacus"], "device must be auto, cpu or cuda, got 'abacus'"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--threads", "-1"], "--threads"),
        (["demo", "--device", "mps"], "device must be auto, cpu or cuda, got 'mps'"),
        (["demo", "--seed", "1" + 23 * "0"], "seed must be from 0"),
        (["demo", "--threads", "999999"], "threads must be at most"),
        (["demo", "--plot", "."], "plot must be a .png"),
        (["plan", "--lengths", "9" * 20], "lengths must be at most"),
        (["plan", "--lengths", "9", "--draw", "no/such/plan.png"], "draw must be a .png"),
        (["plan", "--lengths", "9", "--ranks", "513"], "--ranks"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_command_exits_with_two_and_says_what_is_wrong(arguments: list[str], message: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert message in output


def test_plan_command_prints_a_layout() -> None:
    code, output = invoke(
        "plan", "--lengths", "2049,3001,3142", "--ranks", "2", "--layout", "zigzag"
    )
    assert code == 0, output
    assert "zigzag" in output


def test_version_is_that_of_the_package() -> None:
    assert invoke("--version") == (0, f"longdelta {longdelta.__version__}")


def test_module_lists_the_commands_without_loading_torch() -> None:
    code = f"""
import runpy, sys
sys.path.insert(0, {str(SOURCE)!r})
sys.argv = ["longdelta", "--help"]
try:
    runpy.run_module("longdelta", run_name="__main__")
except SystemExit as end:
    assert end.code in (0, None)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "plan", "doctor"):
        assert command in done.stdout
