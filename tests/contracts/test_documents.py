"""The documents keep their word: examples run, links lead somewhere, records have their parts."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RECORDS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
PARTS = ["Context", "Choice", "Alternatives", "Revisit when"]

CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_readme_code_runs_as_printed() -> None:
    blocks = CODE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert blocks
    assert scope["o"].shape == scope["v"].shape
    assert scope["final_state"].shape == (3, 4, 64, 64)
    for argument in ("q", "k", "v", "g", "beta"):
        gradient = scope[argument].grad
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


def test_the_guide_to_use_runs_as_printed() -> None:
    scope: dict[str, Any] = {}
    text = (ROOT / "docs" / "guides" / "use.md").read_text(encoding="utf-8")
    for block in CODE.findall(text):
        exec(compile(block, "use.md", "exec"), scope)
    for argument in ("q", "k", "v", "a", "b", "A_log", "dt_bias"):
        gradient = scope[argument].grad
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("page", sorted((ROOT / "src").rglob("*.py")), ids=name)
def test_source_names_only_documents_that_exist(page: Path) -> None:
    named = re.findall(r"docs/[\w./-]+\.md", page.read_text(encoding="utf-8"))
    assert [each for each in named if not (ROOT / each).exists()] == []


def test_readme_opens_with_the_two_commands() -> None:
    first = FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()[1:3]] == [
        "make demo",
        "make test",
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_links_only_to_files_that_exist(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    broken = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert broken == []


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_decision_record_has_every_part_within_half_a_page(record: Path) -> None:
    lines = record.read_text(encoding="utf-8").splitlines()
    assert [line[3:] for line in lines if line.startswith("## ")] == PARTS
    assert len(lines) <= 45


def test_decision_records_are_numbered_without_gaps() -> None:
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))
