"""Another revision of this package in the same process, under another name.

The sources of a revision are taken from git and written to a folder with the package renamed
everywhere in the text: imports, operator namespaces and messages. So both versions live side by side
and share nothing but torch.
"""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from longdelta.errors import InvalidInput

_held: list[tempfile.TemporaryDirectory[str]] = []
"""Sources of loaded revisions; compilers of kernels read them again until the process ends."""


@dataclass(frozen=True)
class Revision:
    """A loaded package and the commit it came from."""

    package: ModuleType
    commit: str


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)


def source_folder() -> Path:
    """Where this package lies."""
    return Path(__file__).resolve().parents[1]


def commit_here(folder: Path | None = None) -> str:
    """Commit of a folder's repository, with a + where tracked files differ; "unknown" outside."""
    folder = folder or source_folder()
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if head.returncode:
        return "unknown"
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no").stdout.strip()
    return head.stdout.decode().strip() + ("+" if changed else "")


def load_revision(revision: str, folder: Path | None = None) -> Revision:
    """The package at a git revision, renamed to ``<name>_at_<commit>``.

    Args:
        revision: what git understands: HEAD, HEAD~3, a branch, a tag or a commit.
        folder: of the package inside its repository; default: this package's own.
    Raises:
        InvalidInput: there is no repository, no such revision, or no package in it.
    Source: this project.
    """
    folder = (folder or source_folder()).resolve()
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top.returncode:
        raise InvalidInput(
            f"base={revision!r} needs the package inside a git repository; {folder} is in none. "
            "Install it from a clone with pip install -e ."
        )
    repository = Path(top.stdout.decode().strip()).resolve()
    found = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found.returncode or revision.startswith("-"):
        raise InvalidInput(
            f"base: {revision!r} is no revision of this repository; {_known(repository)}"
        )
    commit = found.stdout.decode().strip()
    where = folder.relative_to(repository).as_posix()
    archive = _git(repository, "archive", "--format=tar", commit, where)
    if archive.returncode:
        raise InvalidInput(f"base: revision {revision!r} ({commit[:12]}) has no {where}")
    name = f"{folder.name}_at_{commit[:12]}"
    if name not in sys.modules:
        sys.path.insert(0, str(_renamed(archive.stdout, where, folder.name, name)))
    return Revision(importlib.import_module(name), commit)


def _known(repository: Path) -> str:
    names = _git(repository, "for-each-ref", "--format=%(refname:short)", "--count=20").stdout
    latest = _git(repository, "log", "-5", "--format=%h %s").stdout
    listed = ", ".join(names.decode().split())
    commits = "; ".join(latest.decode().strip().splitlines())
    return f"it has {listed}; the latest commits are {commits}"


def _renamed(archive: bytes, where: str, old: str, new: str) -> Path:
    """A folder that holds the archived package as `new`."""
    holder = tempfile.TemporaryDirectory(prefix=f"{new}-")
    _held.append(holder)
    root = Path(holder.name)
    word = re.compile(rf"\b{re.escape(old)}\b")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is None:
                continue
            path = root / new / Path(member.name).relative_to(where)
            path.parent.mkdir(parents=True, exist_ok=True)
            data = stream.read()
            if path.suffix == ".py":
                data = word.sub(new, data.decode()).encode()
            path.write_bytes(data)
    return root
