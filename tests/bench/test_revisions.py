"""--base: another revision lives beside this one, and equal sources give equal bits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

import longdelta
from longdelta.bench.baselines import revision_arm
from longdelta.bench.revisions import commit_here, load_revision, source_folder
from longdelta.bench.run import Run
from longdelta.errors import InvalidInput

from .scripted import CPU, Scripted, arm, plan


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with this package in two revisions; the second answers 2 to `answer`."""
    git(tmp_path, "init", "-b", "main")
    package = tmp_path / "src" / "pebble"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from pebble.inner import answer\nname = 'pebble::op'\n", encoding="utf-8"
    )
    for value in (1, 2):
        (package / "inner.py").write_text(f"answer = {value}\n", encoding="utf-8")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-m", f"answer {value}")
    return package


def test_revisions_load_side_by_side_under_their_own_names(repository: Path) -> None:
    old, new = load_revision("HEAD~1", repository), load_revision("HEAD", repository)
    assert (old.package.answer, new.package.answer) == (1, 2)
    assert old.package.__name__ == f"pebble_at_{old.commit[:12]}"
    assert old.package.name == f"{old.package.__name__}::op"
    assert load_revision("HEAD", repository).package is new.package


def test_folder_of_another_checkout_is_a_base_too(repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "src" / "pebble"
    shutil.copytree(repository, other)
    (other / "inner.py").write_text("answer = 7\n", encoding="utf-8")
    found = [load_revision(str(each), repository) for each in (other, tmp_path / "other")]
    assert [each.package.answer for each in found] == [7, 7]
    assert found[0].commit == found[1].commit != load_revision("HEAD", repository).commit


def test_unknown_revision_is_told_what_exists(repository: Path) -> None:
    git(repository, "commit", "--allow-empty", "-m", "words " * 30)
    with pytest.raises(InvalidInput) as found:
        load_revision("v9", repository)
    first, *commits = str(found.value).splitlines()
    assert first.startswith("base: 'v9' is no folder and no revision of this repository")
    assert first.endswith("which has main and lately")
    assert commits[1].endswith("answer 2")
    assert len(commits) == 3
    assert len(commits[0]) <= 68
    with pytest.raises(InvalidInput, match="no revision"):
        load_revision("--all", repository)


def test_folder_without_the_package_or_that_does_not_exist_is_told_so(
    repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    outside = repository.parents[2]  # In no repository the folder is still what is wrong.
    for package in (repository, outside):
        with pytest.raises(InvalidInput, match=f"/empty holds no package {package.name}: neither"):
            load_revision(str(tmp_path / "empty"), package)
        with pytest.raises(InvalidInput, match="base: /no/such/folder is no folder that exists"):
            load_revision("/no/such/folder", package)


def test_package_outside_a_repository_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="inside a git repository"):
        load_revision("HEAD", tmp_path)
    assert commit_here(tmp_path) == "unknown"


def test_commit_of_changed_sources_is_marked(repository: Path) -> None:
    clean = commit_here(repository)
    (repository / "inner.py").write_text("answer = 3\n", encoding="utf-8")
    assert commit_here(repository) == f"{clean}+"


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    """This package as it is now, committed in a repository of its own."""
    folder = tmp_path / "clone"
    shutil.copytree(
        source_folder(), folder / "src" / "longdelta", ignore=shutil.ignore_patterns("__pycache__")
    )
    git(folder, "init", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "now")
    return folder / "src" / "longdelta"


def test_head_as_its_own_base_gives_equal_bits_and_launch_records(
    twin: Path, tmp_path: Path
) -> None:
    revision = load_revision("HEAD", twin)
    assert revision.package is not longdelta
    base = revision_arm(revision.package, revision.commit)
    records = Run(plan(tmp_path, arm("ours", family="longdelta"), base), CPU, Scripted()).all()
    ours = next(r for r in records if (r.arm, r.op) == ("ours", "fwdbwd"))
    same = next(r for r in records if (r.arm, r.op) == ("base", "fwdbwd"))
    assert ours.base_bits == "equal; launch records equal"
    assert (
        same.errors_ours
        == "o 0.0e+00, dq 0.0e+00, dk 0.0e+00, dv 0.0e+00, dg 0.0e+00, dbeta 0.0e+00"
    )
    assert same.groups_ms == (1.0, 1.0, 1.0)


def test_base_with_other_bits_is_found(twin: Path, tmp_path: Path) -> None:
    package = load_revision("HEAD", twin).package

    def changed(*x: torch.Tensor, **options: object) -> object:
        o, state = package.chunk_gated_delta_rule(*x, **options)
        return o * (1 + 2**-20), state

    other = ModuleType(package.__name__)
    other.chunk_gated_delta_rule = changed  # type: ignore[attr-defined]
    base = revision_arm(other, "0" * 40)
    records = Run(plan(tmp_path, arm("ours", family="longdelta"), base), CPU, Scripted()).all()
    ours = next(r for r in records if r.arm == "ours")
    assert ours.base_bits == "differ; launch records equal"
