"""The demo learns, says so, checks its gradients, and refuses what it cannot read."""

import io
import math
import os
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console

import longdelta
from longdelta.cli import demo
from longdelta.cli.demo import DemoOptions, DemoResult, run_demo
from longdelta.cli.spread import SpreadCheck, default_ranks
from longdelta.errors import InvalidInput
from longdelta.nn import GatedDeltaNet
from longdelta.testing import budgets

TEXT = b"The state decays, and the delta rule corrects it; then the query reads it.\n" * 20
COMPARED = ["o", "final_state", "dq", "dk", "dv", "da", "db", "dA_log", "ddt_bias"]
STEPS = 12


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STEP_TOKENS", 160)
    monkeypatch.setattr(demo, "SAMPLE_BYTES", 8)


@pytest.fixture
def options(tmp_path: Path) -> DemoOptions:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return DemoOptions(text=path, steps=STEPS, device="cpu", ranks=1)


def run(options: DemoOptions) -> tuple[DemoResult, str]:
    """The result, and what was printed."""
    printed = io.StringIO()
    result = run_demo(options, Console(file=printed, width=200))
    return result, printed.getvalue()


def test_demo_learns_and_its_gradients_are_within_budget(options: DemoOptions) -> None:
    result, printed = run(options)
    assert len(result.losses) == STEPS
    assert all(math.isfinite(loss) for loss in result.losses)
    # A new model knows nothing: about log 256 nats.
    assert 4.5 < result.losses[0] < 7
    assert result.end_loss < result.losses[0] - 1
    assert [c.name for c in result.comparisons] == COMPARED
    assert all(0 < c.error <= c.budget for c in result.comparisons)
    assert {c.budget for c in result.comparisons} == {budgets.EAGER[torch.float32]}
    assert result.passed
    assert f"text.txt: {len(TEXT):,} bytes" in printed
    assert f"{result.end_loss:.3f} nats/byte at the end" in printed
    assert printed.count("pass") == len(COMPARED)
    assert "FAIL" not in printed
    assert "Sample: " in printed


def test_demo_repeats_itself_bitwise_for_one_seed_and_not_for_another(
    options: DemoOptions,
) -> None:
    short = replace(options, steps=3)
    first, again = run(short)[0], run(short)[0]
    assert replace(first, seconds=0) == replace(again, seconds=0)
    assert run(replace(short, seed=1))[0].losses != first.losses


@pytest.mark.parametrize(("asked", "used"), [(0, 1), (2, 2)])
def test_demo_computes_on_one_thread_unless_told_otherwise(
    options: DemoOptions, monkeypatch: pytest.MonkeyPatch, asked: int, used: int
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    run(replace(options, steps=1, threads=asked))
    assert threads == [used]


def test_demo_on_two_processes_has_the_loss_and_gradients_of_one(
    options: DemoOptions, capfd: pytest.CaptureFixture[str]
) -> None:
    result, announced = run(replace(options, steps=3, ranks=2))
    assert "2 processes on gloo (as asked" in announced
    assert len(result.losses) == 3
    assert result.losses[2] < result.losses[0]
    assert len(result.spread) == 2
    for check, loss in zip(result.spread, (result.losses[0], result.losses[2]), strict=True):
        assert check.loss == loss
        # Sums are taken in another order, so that bits differ; a share left out would be far off.
        assert 0 < check.error <= check.budget == budgets.EAGER[torch.float32]
        assert abs(check.loss - check.loss_alone) <= check.budget * check.loss_alone
        assert 0 < check.largest < check.size
    assert result.passed
    printed = capfd.readouterr().out
    # The first process alone prints.
    assert printed.count("text.txt: ") == 1
    assert "First step: loss " in printed
    assert "Last step: loss " in printed


def test_demo_fails_where_the_processes_disagree_with_one() -> None:
    good = SpreadCheck(5.0, 5.0, 1e-8, 1.0, 1e-7, 5e-5)
    result = DemoResult((5.0, 4.0), 3.0, 1.0, "", (), (good,))
    assert result.passed
    for change in ({"error": 1e-3}, {"error": math.nan}, {"loss": 5.001}, {"loss": math.nan}):
        assert not replace(result, spread=(good, replace(good, **change))).passed


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (3, 1), (4, 2), (64, 2)])
def test_demo_takes_a_second_process_where_there_are_cores_for_it(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert default_ranks(torch.device("cpu")) == (ranks, f"{cores} cores here")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cores)
    assert default_ranks(torch.device("cuda"))[0] == min(2, cores)


def test_demo_says_how_many_processes_it_chose(
    options: DemoOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    _, printed = run(replace(options, steps=1, ranks=None))
    assert "One process (1 cores here); --ranks 2 spreads each step over two." in printed


def test_demo_fails_where_the_op_is_out_of_budget(
    options: DemoOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GatedDeltaNet.mix

    def wrong(self: GatedDeltaNet, *args: object, **kwargs: object) -> object:
        o, final_state = right(self, *args, **kwargs)
        return o * 1.001, final_state

    monkeypatch.setattr(GatedDeltaNet, "mix", wrong)
    result, printed = run(replace(options, steps=1))
    failed = [c.name for c in result.comparisons if not c.passed]
    assert "o" in failed
    assert "dq" in failed
    assert "final_state" not in failed
    assert not result.passed
    assert printed.count("FAIL") == len(failed)


def test_demo_fails_where_the_loss_is_not_a_number() -> None:
    assert not DemoResult((5.0, math.nan), 3.0, 1.0, "", ()).passed
    assert DemoResult((5.0, 4.0), 3.0, 1.0, "", ()).passed


def test_demo_trains_on_a_text_shorter_than_its_documents(options: DemoOptions) -> None:
    options.text.write_bytes(b"ab")
    result, _ = run(replace(options, steps=2))
    assert result.passed


def test_demo_draws_the_loss_curve(options: DemoOptions, tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    _, printed = run(replace(options, steps=1, plot=plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"Loss curve: {plot}" in printed


def test_byte_entropy_is_that_of_the_frequencies() -> None:
    for text, nats in ((b"aaaa", 0.0), (b"abab", math.log(2)), (bytes(range(256)), math.log(256))):
        assert abs(demo.byte_entropy(text) - nats) <= budgets.FLOAT64


def test_end_loss_is_the_mean_of_the_last_tenth() -> None:
    losses = tuple(float(step) for step in range(40))
    assert DemoResult(losses, 0.0, 0.0, "", ()).end_loss == 37.5
    assert DemoResult((2.0, 1.0), 0.0, 0.0, "", ()).end_loss == 1.0


def test_batch_packs_pieces_of_the_text_with_their_next_bytes() -> None:
    # Every byte differs from the next by one, so that a target tells where its token stood.
    data = torch.arange(251).repeat(8)
    seen = set()
    for seed in range(5):
        batch = demo.draw_batch(data, random.Random(seed))
        bounds = batch.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == batch.tokens.shape[1] == demo.STEP_TOKENS
        assert torch.equal(batch.targets, (batch.tokens + 1) % 251)
        within = torch.ones(demo.STEP_TOKENS, dtype=torch.bool)
        within[batch.cu_seqlens[:-1]] = False
        follows = batch.targets.roll(1) == batch.tokens
        assert follows[0][within].all()
        seen |= {end - begin for begin, end in pairwise(bounds)}
    assert len(seen) > 5


def test_sample_starts_with_a_piece_of_the_text() -> None:
    torch.manual_seed(0)
    data = torch.full((40,), ord("x"))
    line = demo.write_line(demo.ByteModel(), data, random.Random(0))
    assert line.startswith("x" * 16)


def test_default_text_is_the_documentation_of_the_source_tree() -> None:
    root = Path(longdelta.__file__).parents[2]
    name, text = demo.read_text(None)
    assert name == "The project's documentation"
    assert text.startswith((root / "README.md").read_bytes())
    for document in root.glob("docs/**/*.md"):
        assert document.read_bytes() in text


def test_default_text_of_an_installed_package_is_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib" / "site-packages" / "longdelta"
    (package / "nn").mkdir(parents=True)
    (package / "__init__.py").write_text("first")
    (package / "nn" / "layer.py").write_text("second")
    monkeypatch.setattr(longdelta, "__file__", str(package / "__init__.py"))
    assert demo.read_text(None) == ("The package's sources", b"first\nsecond")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": Path("no/such/file")}, "text must be a readable file, got no/such/file"),
        ({"text": Path(__file__).parent}, "text must be a readable file"),
        ({"device": "abacus"}, "device must be auto, cpu or cuda, got 'abacus'"),
        ({"device": "meta"}, "device must be auto, cpu or cuda, got 'meta'"),
        ({"device": "mps"}, "device must be auto, cpu or cuda, got 'mps'"),
        ({"seed": 10**23}, r"seed must be from 0 to 2\*\*63 - 1, got 10{23}"),
        ({"seed": -1}, r"seed must be from 0 to 2\*\*63 - 1, got -1"),
        ({"threads": 999_999}, r"threads must be at most \d+, 4 for each core here, got 999999"),
        ({"ranks": 1, "layout": "fragments"}, "layout must be one of .*, balanced, got 'fragm"),
        ({"ranks": 10**9}, "ranks must be at least 1 and at most 64, got 10{9}"),
        ({"plot": Path(__file__).parent}, r"plot must be a \.png"),
        ({"device": "cuda:99"}, "device must be present, got 'cuda:99'"),
        ({"ranks": 0}, "ranks must be at least 1 and at most 64, got 0"),
        ({"ranks": 2, "layout": "spiral"}, "layout must be one of contiguous, .* got 'spiral'"),
        ({"ranks": 2, "align": "word"}, "align must be one of token, segment, got 'word'"),
        ({"plot": Path("loss.svg")}, r"plot must be a \.png .* got loss\.svg"),
        ({"plot": Path("no/such/folder/loss.png")}, "plot must be .* folder that exists"),
    ],
)
def test_demo_names_the_option_at_fault(
    options: DemoOptions, change: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        run(replace(options, **change))


def test_demo_refuses_a_folder_named_like_a_picture(options: DemoOptions, tmp_path: Path) -> None:
    (tmp_path / "loss.png").mkdir()
    with pytest.raises(InvalidInput, match=r"plot must be a \.png .* got .*loss\.png"):
        run(replace(options, plot=tmp_path / "loss.png"))


@pytest.mark.parametrize("text", [b"", b"a"])
def test_demo_refuses_a_text_without_a_next_byte(options: DemoOptions, text: bytes) -> None:
    options.text.write_bytes(text)
    with pytest.raises(InvalidInput, match=f"at least 2 bytes, got {len(text)} in .*text.txt"):
        run(options)
