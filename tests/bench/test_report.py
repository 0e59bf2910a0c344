"""CSV and tables: nothing is lost on the way, and the page says what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from longdelta.bench.report import moved_section, reversed_pairs, run_section, write_report
from longdelta.bench.results import Record, read_csv, write_csv
from longdelta.bench.run import Run
from longdelta.bench.timing import Slot
from longdelta.errors import InvalidInput

from .scripted import CPU, Scripted, arm, plan

MS = {"ours": 1.0, "ours_fast": 0.8, "fla": 3.0, "flash_qla": 2.0, "base": 1.1}


def measured(folder: Path, **changes: object) -> list[Record]:
    def ms(slot: Slot) -> float:
        return MS.get(slot.arm, 1.0) * (1 + 0.02 * (slot.group == 1 and slot.arm == "fla"))

    given = plan(folder, *(arm(name) for name in MS), **changes)
    return Run(given, CPU, Scripted(ms)).all()


def test_csv_gives_back_what_was_written(tmp_path: Path) -> None:
    records = measured(tmp_path)
    path = tmp_path / "again.csv"
    write_csv(records, path)
    again = read_csv(path)
    assert [r.groups_ms for r in again] == [r.groups_ms for r in records]
    assert [replace(r, floor_ms=0, matmul_tflops=0, copy_gbs=0) for r in again] == [
        replace(r, floor_ms=0, matmul_tflops=0, copy_gbs=0) for r in records
    ]


def test_table_has_the_seeds_columns_and_the_strongest_peer(tmp_path: Path) -> None:
    page = run_section("one", measured(tmp_path))
    line = next(line for line in page.splitlines() if "| forward |" in line)
    assert "row, (1, 2), 91; eager; run 1" in line
    assert "| 1.000 | 0.800 | 1.100 | 2.000 (flash_qla) | 2.000 [2.000, 2.000] |" in line
    assert "1.100 [1.100, 1.100] | 1.250 [1.250, 1.250] |" in line


def test_table_marks_unstable_cells_and_states_the_rows(tmp_path: Path) -> None:
    page = run_section("one", measured(tmp_path))
    assert "3.000 UNSTABLE" in page
    assert "| row | (1, 2) | 91 | 3 | mild | 5 |" in page
    assert "3 groups x 2 calls x (0 + 1)" in page


def test_report_rebuilds_the_page_and_the_plots_from_the_files(tmp_path: Path) -> None:
    measured(tmp_path)
    written = write_report(tmp_path)
    first = written.page.read_text(encoding="utf-8")
    assert str(written) == f"{tmp_path / 'report.md'} with 4 plots"
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert [name.split("-eager-")[1] for name in pictures] == [
        "ceiling.png",
        "speedup.png",
        "time-fwd.png",
        "time-fwdbwd.png",
    ]
    assert all(f"({name})" in first for name in pictures)
    for path in [*tmp_path.glob("*.png"), tmp_path / "report.md"]:
        path.unlink()
    assert write_report(tmp_path).page.read_text(encoding="utf-8") == first
    assert sorted(path.name for path in tmp_path.glob("*.png")) == pictures


def test_report_of_a_folder_without_results_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no results"):
        write_report(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"is no result of longdelta bench: it lacks H, HV, arm"):
        write_report(tmp_path)


def test_reversed_run_is_paired_and_its_moves_are_counted(tmp_path: Path) -> None:
    first, second = measured(tmp_path, ops=("fwd",)), measured(tmp_path, ops=("fwd",), reverse=True)
    assert second[0].order == "reversed"
    pairs = reversed_pairs({"a": first, "b": second, "c": []})
    assert pairs == [("a", "b")]
    slower = [replace(r, groups_ms=tuple(1.04 * x for x in r.groups_ms)) for r in second]
    section = moved_section("a", first, "b", slower)
    assert "| a | eager | 5 | 1 (20 %) |" in section
    assert "eager: medians of 5 cells moved by 4.00 % in the middle and 4.00 % at most" in section
