"""Which ptxas compiles the kernels, and that nothing else of the process changes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from longdelta.runtime import toolchain

triton = pytest.importorskip("triton", reason="no Triton here")
knobs = pytest.importorskip("triton.knobs")
nvidia = pytest.importorskip("triton.backends.nvidia.compiler")


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No choice of this machine's user, no extra, nothing remembered."""
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "_extra", lambda: None)
    toolchain.ptxas.cache_clear()
    yield
    toolchain.ptxas.cache_clear()


@pytest.fixture
def assembler(tmp_path: Path):
    """Makes a file that says that it is a ptxas of some version."""

    def made(version: str) -> Path:
        path = tmp_path / f"ptxas-{version}"
        release = version.rsplit(".", 1)[0]
        path.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{version}\n")
        path.chmod(0o755)
        return path

    return made


def test_ptxas_is_tritons_own_where_there_is_no_other():
    found = toolchain.ptxas()
    assert found.path == Path(nvidia.get_ptxas(90).path)
    assert found.version[:2] == tuple(map(int, nvidia.get_ptxas(90).version.split(".")))
    assert found.origin == "Triton's own"


@pytest.mark.parametrize(("version", "taken"), [("99.1.2", True), ("11.8.89", False)])
def test_ptxas_of_the_extra_is_taken_where_it_is_newer(monkeypatch, assembler, version, taken):
    extra = assembler(version)
    monkeypatch.setattr(toolchain, "_extra", lambda: extra)
    assert (toolchain.ptxas().path == extra) is taken
    assert (str(toolchain.ptxas()) == f"{version} (longdelta[ptxas])") is taken


def test_ptxas_that_the_user_chose_is_kept_although_older(monkeypatch, assembler):
    monkeypatch.setattr(toolchain, "_extra", lambda: assembler("99.1.2"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler("12.4.5")))
    found = toolchain.ptxas()
    assert found.version == (12, 4, 5)
    assert "chosen by TRITON_PTXAS_PATH" in str(found)


@pytest.mark.filterwarnings("error")
def test_a_ptxas_that_the_user_names_and_that_is_not_there_is_said(monkeypatch, tmp_path):
    toolchain.ptxas.cache_clear()
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "none"))
    with pytest.warns(UserWarning, match="TRITON_PTXAS_PATH must name a ptxas; .*none is no file"):
        toolchain.ptxas()


@pytest.mark.parametrize(("driver", "taken"), [(99010, True), (13000, False)])
def test_ptxas_of_a_later_cuda_generation_than_the_drivers_is_not_taken(
    monkeypatch, assembler, driver, taken
):
    extra = assembler("99.1.2")
    monkeypatch.setattr(toolchain, "_extra", lambda: extra)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    assert (toolchain.ptxas().path == extra) is taken


@pytest.mark.parametrize("content", ["", "#!/no/such/program\n", "#!/bin/sh\necho hello\n"])
def test_ptxas_of_an_extra_that_does_not_run_is_passed_over(monkeypatch, tmp_path, content):
    broken = tmp_path / "ptxas"
    broken.write_text(content)
    broken.chmod(0o755)
    monkeypatch.setattr(toolchain, "_extra", lambda: broken)
    assert toolchain.ptxas().origin == "Triton's own"


def test_extra_is_found_by_the_name_of_its_file(monkeypatch, tmp_path):
    class File:
        def __init__(self, name: str) -> None:
            self.name = name

        def locate(self) -> Path:
            return tmp_path / self.name

    monkeypatch.undo()  # the fixture's stand-in
    monkeypatch.setattr(metadata, "files", lambda _: [File("nvlink"), File("ptxas")])
    assert toolchain._extra() == tmp_path / "ptxas"
    monkeypatch.setattr(metadata, "files", lambda _: None)
    assert toolchain._extra() is None


def test_triton_version_is_none_where_triton_is_not_installed(monkeypatch):
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    assert toolchain.triton_version() == triton.__version__
    monkeypatch.setattr(metadata, "version", absent)
    assert toolchain.triton_version() is None


def test_compiling_uses_the_newest_ptxas_and_leaves_everything_as_it_was(monkeypatch, assembler):
    extra = assembler("99.1.2")
    monkeypatch.setattr(toolchain, "_extra", lambda: extra)

    def state() -> tuple[str, str, bool]:
        fused = knobs.language.default_fp_fusion
        return nvidia.get_ptxas(90).path, nvidia.get_ptxas_version(90), fused

    def fails() -> None:
        with toolchain.compiling():
            path, version, fused = state()
            assert (path, "99.1.2" in version, fused) == (str(extra), True, True)
            raise KeyError

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    before = state()
    with pytest.raises(KeyError):
        fails()
    assert state() == before
