"""doctor says what is here and what would run."""

import io
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import longdelta
from longdelta.cli import doctor
from longdelta.cli.doctor import run_compile, run_doctor
from longdelta.cli.main import app
from longdelta.runtime import toolchain


def printed() -> str:
    out = io.StringIO()
    run_doctor(Console(file=out, width=200))
    return " ".join(out.getvalue().split())


def compiled(width: int = 200) -> tuple[bool, str]:
    out = io.StringIO()
    good = run_compile(Console(file=out, width=width))
    return good, " ".join(out.getvalue().split())


def test_doctor_prints_the_versions_that_run_here() -> None:
    text = printed()
    for version in (platform.python_version(), torch.__version__):
        assert version in text


def test_doctor_prints_the_backend_of_support_and_each_reason_against_the_others() -> None:
    text, support = printed(), longdelta.support(device=torch.device("cpu"))
    assert "Backends on cpu" in text
    assert support.backend == "eager"
    for backend, reason in support.reasons.items():
        assert backend in text
        assert backend == support.backend or " ".join(reason.split()) in text


def test_doctor_says_that_a_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.importlib.metadata, "version", absent)
    assert "triton │ not installed" in printed()


@pytest.mark.parametrize(("version", "advice"), [((12, 8, 93), True), ((13, 5, 37), False)])
def test_doctor_names_the_ptxas_and_advises_a_newer_one_where_it_is_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: tuple[int, ...], advice: bool
) -> None:
    found = toolchain.Ptxas(tmp_path, version, "longdelta[ptxas]")
    monkeypatch.setattr(toolchain, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(toolchain, "ptxas", lambda: found)
    assert f"{'.'.join(map(str, version))} (longdelta[ptxas])" in printed()
    assert ("pip install 'longdelta[ptxas]'" in printed()) is advice


def test_doctor_compile_says_plainly_that_triton_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "triton_version", lambda: None)
    good, text = compiled()
    assert not good
    assert text.startswith("Triton is not installed: the Hopper kernels cannot be compiled here.")
    assert text.endswith(f"pip install 'triton=={toolchain.TRITON_CHECKED[0]}.*'")
    assert "ptxas for the kernels │ none: it comes with Triton" in printed()
    assert CliRunner().invoke(app, ["doctor", "--compile"]).exit_code == 1


def test_doctor_compile_prints_a_row_per_kernel_and_whether_all_are_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="no Triton here")
    from longdelta.kernels.gluon import compile

    fold = [variant for variant in compile.VARIANTS if variant.name == "fold"]
    monkeypatch.setattr(compile, "VARIANTS", fold)
    good, text = compiled()
    assert good
    assert "fold" in text
    assert "good" in text
    long = "scan, the longest name"
    monkeypatch.setattr(compile, "VARIANTS", [replace(fold[0], name=long)])
    assert f"{long} " in compiled(width=80)[1]
    monkeypatch.setattr(compile, "VARIANTS", [replace(fold[0], products=23)])
    good, text = compiled()
    assert not good
    assert "24 wgmma instead of 23" in text
