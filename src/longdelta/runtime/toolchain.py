"""Which Triton and which ptxas make the kernels.

Note [ptxas]: before CUDA 13.3 ptxas may give away registers of the left operand of a wgmma that is
still running, and the walks hold their states as such operands. Triton 3.6 and 3.7 bring 12.8 for
Hopper. So the newest of Triton's own and of the extra `longdelta[ptxas]` compiles, unless the user
has chosen one, and only what is compiled here: other kernels of the process keep Triton's.
"""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

TRITON_CHECKED = ("3.6", "3.7", "3.8", "3.9")
"""Releases under which every kernel compiles; the tests compile them under the first and last."""
PTXAS_SAFE = (13, 3)
"""The first ptxas that keeps the registers of Note [ptxas]."""


@dataclass(frozen=True)
class Ptxas:
    """An assembler of NVIDIA's, and where it comes from."""

    path: Path
    version: tuple[int, ...]
    origin: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))} ({self.origin})"


def triton_version() -> str | None:
    """Of the Triton that is installed; None where there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def _version(path: Path) -> tuple[int, ...]:
    """Of a ptxas; () where it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ()
    found = re.search(r"V(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def _extra() -> Path | None:
    """The ptxas of `longdelta[ptxas]`."""
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.name in ("ptxas", "ptxas.exe")), None)


def _driver_takes(version: tuple[int, ...]) -> bool:
    """Whether the driver, if there is one, belongs to the same CUDA generation or a later one."""
    if not torch.cuda.is_available():
        return True
    driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return driver // 1000 >= version[0]


def _knob() -> str:
    """The name under which Triton keeps its ptxas for Hopper: 3.9 moved it to the newer one."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    return "ptxas" if get_ptxas(90) == knobs.nvidia.ptxas else "ptxas_blackwell"


@lru_cache(maxsize=1)
def ptxas() -> Ptxas:
    """The ptxas that compiles the kernels: Note [ptxas]."""
    import triton
    from triton import knobs

    # Triton's own variable, which Triton passes by where it leads nowhere.
    asked = os.getenv("TRITON_PTXAS_PATH")  # noqa: TID251
    if asked and not Path(asked).is_file():
        warnings.warn(f"TRITON_PTXAS_PATH must name a ptxas; {asked} is no file", stacklevel=2)
    brought = Path(triton.__file__).parent
    for name in (_knob(), "ptxas"):
        chosen = Path(getattr(knobs.nvidia, name).path)
        if not chosen.is_relative_to(brought):
            return Ptxas(chosen, _version(chosen), "chosen by TRITON_PTXAS_PATH or Triton's knob")
    own = Path(getattr(knobs.nvidia, _knob()).path)
    best = Ptxas(own, _version(own), "Triton's own")
    extra = _extra()
    if extra is not None:
        version = _version(extra)
        if version > best.version and _driver_takes(version):
            best = Ptxas(extra, version, "longdelta[ptxas]")
    return best


def described() -> dict[str, str]:
    """Versions that the machine code depends on."""
    return {"triton": triton_version() or "none", "ptxas": str(ptxas())}


def cache_folder() -> Path:
    """Where Triton keeps what it compiles."""
    from triton import knobs

    return Path(knobs.cache.dir)


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, Triton compiles with `ptxas()`, and its cache knows those cubins as that one's."""
    from triton import knobs
    from triton.backends.nvidia import compiler

    with knobs.language.scope(), knobs.nvidia.scope():
        # Products and sums fused, as was the default up to 3.9: other bits otherwise.
        knobs.language.default_fp_fusion = True
        setattr(knobs.nvidia, _knob(), str(ptxas().path))
        compiler.get_ptxas_version.cache_clear()
        try:
            yield
        finally:
            compiler.get_ptxas_version.cache_clear()
