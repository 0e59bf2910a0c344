"""`longdelta plan`: the tables name what the plan holds, and the picture is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import typer
from matplotlib.axes import Axes
from rich.console import Console

from longdelta.cli import picture
from longdelta.cli.options import document_lengths
from longdelta.cli.picture import Layer
from longdelta.cli.plan import draw_plan, plan_command, print_plan
from longdelta.plan import bytes_needed, cost, partition


def _printed(console: Console) -> list[str]:
    return [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]


REST = {"heads": "2,6", "draw": None, "save": "light", "backend": "eager"}
"""Options of `plan_command` that a test does not change."""


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=120, file=io.StringIO())


def test_plan_prints_who_holds_which_tokens_and_what_crosses(console: Console) -> None:
    print_plan(partition([0, 2049, 5050, 8192], 2, "zigzag"), Layer(2, 6), console)
    lines = _printed(console)
    assert "0 4,096 65 9 0[0:2048), 2[1094:3142)" in lines
    assert "1 4,096 66 10 0[2048:2049), 1, 2[0:1094)" in lines
    assert "2 crossings, 1 relay round each way" in lines
    assert "0 2,048 0 1 0 0" in lines
    assert "2 1,094 1 0 0 0" in lines
    assert any("differ from one" in line for line in lines)


def test_plan_prints_the_bytes_of_the_backend_and_save_mode_asked_for(console: Console) -> None:
    layer = Layer(2, 6, save="full", backend="gluon")
    print_plan(partition([0, 8192], 1), layer, console)
    needs = bytes_needed([0, 8192], num_heads=2, num_v_heads=6, save="full", backend="gluon")
    lines = _printed(console)
    assert any("save=full, gluon backend" in line for line in lines)
    assert any(f"{needs.saved / 2**20:.1f} MiB" in line for line in lines)


def test_plan_prints_the_bytes_that_bytes_needed_gives(console: Console) -> None:
    print_plan(partition([0, 8192], 2, align="segment", num_v_heads=6), Layer(2, 6), console)
    needs = bytes_needed([0, 8192], num_heads=2, num_v_heads=6, ranks=2, conv1d_kernel_size=4)
    assert needs.sent("forward") == 384 * 1024 + 7680
    row = next(line for line in _printed(console) if "384.0 KiB" in line)
    assert row.endswith("384.0 KiB as relay 7.5 KiB")
    assert f"{needs.saved / 2**20:.1f} MiB" in row


def test_plan_without_crossings_says_so_and_prints_no_empty_table(console: Console) -> None:
    print_plan(partition([0, 64, 128], 2), Layer(2, 6), console)
    lines = _printed(console)
    assert "0 crossings: no state is sent between ranks." in lines
    assert not any("after token" in line for line in lines)


def test_plan_draws_ranks_and_crossings(tmp_path: Path) -> None:
    import matplotlib.image

    for ranks in (1, 4):
        path = tmp_path / f"{ranks}.png"
        draw_plan(partition([0, 100, 100, 900], ranks, "zigzag"), Layer(2, 6), path)
        picture = matplotlib.image.imread(path)
        assert picture.shape[1] == 11 * 150
        assert len({tuple(pixel) for pixel in picture.reshape(-1, picture.shape[2])[::7]}) > 10


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": "12,x"}, "lengths must be tokens with commas between, .* got '12,x'"),
        ({"lengths": "1x2x3"}, "lengths must be tokens with commas between, .* got '1x2x3'"),
        ({"lengths": "-1"}, "lengths must be tokens with commas between, .* got '-1'"),
        ({"lengths": "9" * 20}, f"at most 65,536 documents and {2**31:,} tokens in all"),
        ({"lengths": f"{2**31},1"}, f"at most 65,536 documents and {2**31:,} tokens in all"),
        ({"lengths": "65537x0"}, "lengths must be at most 65,536 documents"),
        ({"lengths": "9" * 5000}, "lengths must be tokens .* got '9{40}[.]{3}9{10}'"),
        (
            {"lengths": "257x1", "ranks": 256, "layout": "zigzag_per_document"},
            "lengths must be at most 256 documents for 256 ranks of zigzag_per_document, got 257",
        ),
        ({"heads": "2"}, "heads must be two integers like 16,48, .* got '2'"),
        ({"heads": "2,5"}, "heads must be .* the second a multiple of the first, got '2,5'"),
        ({"heads": "0,0"}, "heads must be two integers like 16,48, .* got '0,0'"),
        ({"layout": "spiral"}, "layout must be one of .*, balanced, got 'spiral'"),
        ({"layout": "fragments"}, "layout must be one of .*, balanced, got 'fragments'"),
        ({"save": "all"}, "save must be one of none, light, full, got 'all'"),
        ({"backend": "cuda"}, "backend must be one of eager, gluon, got 'cuda'"),
        ({"draw": Path("no/such/folder/plan.png")}, "draw must be .* folder that exists"),
        ({"draw": Path("plan.svg")}, r"draw must be a \.png .* got plan\.svg"),
        ({"draw": Path(__file__).parent}, r"draw must be a \.png"),
    ],
)
def test_plan_names_the_option_that_is_wrong_before_it_prints(
    changed: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"lengths": "100", "ranks": 2, "layout": "contiguous", "align": "token", **changed}
    with pytest.raises(typer.BadParameter, match=message):
        plan_command(**{**REST, **options})
    assert capsys.readouterr().out == ""


def test_lengths_may_count_equal_documents() -> None:
    assert document_lengths("7, 3x4096,0,1x1") == [7, 4096, 4096, 4096, 0, 1]
    assert document_lengths(f"{2**31}") == [2**31]


def test_plan_counts_one_of_a_kind_in_the_singular_and_names_the_backend(console: Console) -> None:
    print_plan(partition([0, 1], 1), Layer(1, 1), console)
    lines = _printed(console)
    assert lines[0] == "contiguous, align=token: 1 document, 1 token on 1 rank"
    assert any("(H, HV) = (1, 1), bfloat16, save=light, eager backend" in line for line in lines)


def test_plan_of_many_tokens_or_fragments_walks_none_of_them(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("walked")

    monkeypatch.setattr(cost, "walk", refused)
    print_plan(partition([0, 2**31], 2), Layer(2, 6), console)
    # Half of 2^25 chunks, in segments of 128.
    assert "0 1,073,741,824 16,777,216 131,072 0[0:1073741824)" in _printed(console)


def test_plan_draws_no_more_arrows_than_can_be_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    right = Axes.set_title
    monkeypatch.setattr(
        Axes, "set_title", lambda self, label, **rest: titles.append(label) or right(self, label)
    )
    arrows: list[object] = []
    monkeypatch.setattr(Axes, "annotate", lambda *_, **__: arrows.append(None))
    monkeypatch.setattr(picture, "ARROWS", 5)
    draw_plan(partition([0, 900], 8), Layer(2, 6), tmp_path / "many.png")
    draw_plan(partition([0, 900], 2), Layer(2, 6), tmp_path / "few.png")
    assert len(arrows) == 5 + 1
    assert "7 crossings (the first 5 drawn), 7 relay rounds" in titles[0]
    assert "1 crossing, 1 relay round" in titles[1]
