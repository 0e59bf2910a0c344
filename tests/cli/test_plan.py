"""`longdelta plan`: the tables name what the plan holds, and the picture is drawn."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer
from rich.console import Console

from longdelta.cli.plan import draw_plan, plan_command, print_plan
from longdelta.plan import bytes_needed, partition


def _printed(console: Console) -> list[str]:
    return [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=120, file=io.StringIO())


def test_plan_prints_who_holds_which_tokens_and_what_crosses(console: Console) -> None:
    print_plan(partition([0, 2049, 5050, 8192], 2, "zigzag"), 2, 6, console)
    lines = _printed(console)
    assert "0 4,096 65 9 0[0:2048), 2[1094:3142)" in lines
    assert "1 4,096 66 10 0[2048:2049), 1, 2[0:1094)" in lines
    assert "2 crossings, 1 relay round each way" in lines
    assert "0 2,048 0 1 0 0" in lines
    assert "2 1,094 1 0 0 0" in lines
    assert any("differ from one" in line for line in lines)


def test_plan_prints_the_bytes_that_bytes_needed_gives(console: Console) -> None:
    print_plan(partition([0, 8192], 2, align="segment", num_v_heads=6), 2, 6, console)
    needs = bytes_needed([0, 8192], num_heads=2, num_v_heads=6, ranks=2, conv1d_kernel_size=4)
    assert needs.sent("forward") == 384 * 1024 + 7680
    row = next(line for line in _printed(console) if "384.0 KiB" in line)
    assert row.endswith("384.0 KiB as relay 7.5 KiB")
    assert f"{needs.saved / 2**20:.1f} MiB" in row


def test_plan_draws_ranks_and_crossings(tmp_path: Path) -> None:
    import matplotlib.image

    for ranks in (1, 4):
        path = tmp_path / f"{ranks}.png"
        draw_plan(partition([0, 100, 100, 900], ranks, "zigzag"), 2, 6, path)
        picture = matplotlib.image.imread(path)
        assert picture.shape[1] == 11 * 150
        assert len({tuple(pixel) for pixel in picture.reshape(-1, picture.shape[2])[::7]}) > 10


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": "12,x"}, "lengths must be integers with commas between, got '12,x'"),
        ({"heads": "2"}, "heads must be two integers like 16,48, got '2'"),
        ({"heads": "2,5"}, "num_v_heads must be a multiple of num_heads = 2"),
        ({"layout": "spiral"}, "layout must be one of"),
    ],
)
def test_plan_names_the_option_that_is_wrong(changed: dict[str, str], message: str) -> None:
    options = {"lengths": "100", "ranks": 2, "layout": "contiguous", "align": "token", **changed}
    with pytest.raises(typer.BadParameter, match=message):
        plan_command(**{"heads": "2,6", "draw": None, **options})
