"""doctor says what is here and what would run."""

import io
import platform

import pytest
import torch
from rich.console import Console

import longdelta
from longdelta.cli import doctor
from longdelta.cli.doctor import run_doctor


def printed() -> str:
    out = io.StringIO()
    run_doctor(Console(file=out, width=200))
    return " ".join(out.getvalue().split())


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
