"""Another revision of this package in the same process, under another name.

The sources of a revision are taken from git and written to a folder with the package renamed
everywhere in the text: imports, operator namespaces and messages. So both versions live side by
side and share nothing but torch.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
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
        revision: what git understands (HEAD, HEAD~3, a branch, a tag, a commit), or a folder that
            holds another checkout's package.
        folder: of the package inside its repository; default: this package's own.
    Raises:
        InvalidInput: there is no repository, no such revision, or no package in it.
    Source: this project.
    """
    folder = (folder or source_folder()).resolve()
    other = next(iter(_packages(Path(revision), folder.name)), None)
    if other is not None:
        sources = {
            path.relative_to(other).as_posix(): path.read_bytes()
            for path in sorted(other.rglob("*.py"))
        }
        commit = hashlib.sha256(repr(sources).encode()).hexdigest()
    else:
        try:
            commit, sources = _from_git(revision, folder)
        except InvalidInput as error:
            raise InvalidInput(_no_folder(revision, folder.name) or str(error)) from None
    name = f"{folder.name}_at_{commit[:12]}"
    if name not in sys.modules:
        sys.path.insert(0, str(_renamed(sources, folder.name, name)))
    return Revision(importlib.import_module(name), commit)


def _packages(folder: Path, name: str) -> list[Path]:
    """Where a folder holds the package: in src, right inside, or itself."""
    places = [folder / "src" / name, folder / name, folder]
    return [each for each in places if each.name == name and (each / "__init__.py").is_file()]


def _no_folder(text: str, name: str) -> str:
    """Why a text that must mean a folder is no base, or nothing where it may be a revision."""
    if Path(text).is_dir():
        return f"base: folder {text} holds no package {name}: neither src/{name} nor {name} in it"
    if Path(text).is_absolute() or text.startswith((".", "~")):
        return f"base: {text} is no folder that exists"
    return ""


def _from_git(revision: str, folder: Path) -> tuple[str, dict[str, bytes]]:
    """The commit, and the sources of the package in it by their paths."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top.returncode:
        raise InvalidInput(
            f"base={revision!r} needs the package inside a git repository; {folder} is in none. "
            "Install it from a clone with pip install -e ., or name a folder with another checkout"
        )
    repository = Path(top.stdout.decode().strip()).resolve()
    found = _git(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found.returncode or revision.startswith("-"):
        raise InvalidInput(
            f"base: {revision!r} is no folder and no revision of this repository, "
            f"{_known(repository)}"
        )
    commit = found.stdout.decode().strip()
    where = folder.relative_to(repository).as_posix()
    archive = _git(repository, "archive", "--format=tar", commit, where)
    if archive.returncode:
        raise InvalidInput(f"base: revision {revision!r} ({commit[:12]}) has no {where}")
    sources: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        for member in tar.getmembers():
            stream = tar.extractfile(member) if member.name.endswith(".py") else None
            if stream is not None:
                sources[Path(member.name).relative_to(where).as_posix()] = stream.read()
    return commit, sources


def _known(repository: Path) -> str:
    """Branches and tags, and the latest commits on a line each."""
    names = _git(repository, "for-each-ref", "--format=%(refname:short)", "--count=5").stdout
    latest = _git(repository, "log", "-4", "--format=%h %s").stdout.decode().splitlines()
    listed = ", ".join(names.decode().split())
    return "\n".join(
        [
            f"which has {listed} and lately",
            *(shorten(each, 68, placeholder="...") for each in latest),
        ]
    )


def _renamed(sources: dict[str, bytes], old: str, new: str) -> Path:
    """A folder that holds the package as `new`."""
    holder = tempfile.TemporaryDirectory(prefix=f"{new}-")
    _held.append(holder)
    word = re.compile(rf"\b{re.escape(old)}\b")
    for name, data in sources.items():
        path = Path(holder.name) / new / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(word.sub(new, data.decode("utf-8")), encoding="utf-8")
    return Path(holder.name)
