"""``longdelta doctor``: what is here, what would run, and why the rest would not."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch
from rich.console import Console
from rich.table import Table

import longdelta


def run_doctor(console: Console | None = None) -> None:
    """Print versions, devices, and for each device the backend that runs there."""
    console = console or Console()
    console.print(_versions())
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        console.print(_backends(device))


def _versions() -> Table:
    table = Table(title="Versions", show_header=False)
    table.add_row("python", platform.python_version())
    table.add_row("platform", platform.platform())
    for package in ("longdelta", "torch", "triton"):
        table.add_row(package, _version(package))
    table.add_row("CUDA of torch", torch.version.cuda or "none")
    table.add_row("CPU cores, torch threads", f"{os.cpu_count()}, {torch.get_num_threads()}")
    return table


def _backends(device: torch.device) -> Table:
    """One row per backend: it runs, or the reason against it."""
    support = longdelta.support(device=device)
    table = Table(title=f"Backends on {_device_name(device)}, for bfloat16, K = V = 128")
    table.add_column("backend")
    table.add_column("here")
    table.add_row(support.backend, "[green]runs[/green]")
    for backend, reason in support.reasons.items():
        if backend != support.backend:
            table.add_row(backend, f"does not run: {reason}")
    return table


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({platform.machine()})"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{device} ({properties.name}, sm_{properties.major}{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB)"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
