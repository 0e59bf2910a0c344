"""``longdelta doctor``: what is here, what would run, and why the rest would not.

With ``--compile``: what Triton makes of the Hopper kernels.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import longdelta
from longdelta.runtime import toolchain


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
    table.add_row("ptxas for the kernels", _ptxas())
    table.add_row("CUDA of torch", torch.version.cuda or "none")
    table.add_row("CPU cores, torch threads", f"{os.cpu_count()}, {torch.get_num_threads()}")
    return table


def _ptxas() -> str:
    if toolchain.triton_version() is None:
        return "none: it comes with Triton"
    found, safe = toolchain.ptxas(), ".".join(map(str, toolchain.PTXAS_SAFE))
    advice = f"; {safe} and newer avoid a known fault: pip install 'longdelta[ptxas]'"
    return escape(f"{found}{'' if found.version >= toolchain.PTXAS_SAFE else advice}")


def run_compile(console: Console | None = None) -> bool:
    """Compile every Hopper kernel for sm_90a, print what came out, and say whether all is well.

    Needs Triton and no GPU. Nothing runs.
    """
    console = console or Console()
    if toolchain.triton_version() is None:
        first, last = toolchain.TRITON_CHECKED[0], toolchain.TRITON_CHECKED[-1]
        console.print(
            "Triton is not installed: the Hopper kernels cannot be compiled here. "
            f"They were checked with {first} to {last}: pip install 'triton=={first}.*'",
            markup=False,
            soft_wrap=True,
        )
        return False
    from longdelta.kernels.gluon.compile import reports

    made = escape(", ".join(f"{name} {x}" for name, x in toolchain.described().items()))
    table = Table(
        title=f"Kernels for sm_90a: {made}",
        title_justify="left",
        caption="registers and spills of a thread, shared memory of a program",
        caption_justify="left",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    # Eighty columns hold it: whole names, and faults in lines of their own below.
    table.add_column("kernel", no_wrap=True)
    for name in ("registers", "spills\nB", "shared\nB", "code\nB", "wgmma", "s", ""):
        table.add_column(name, justify="right", no_wrap=True)
    seconds, bad = 0.0, list[str]()
    # On the error stream, since what ptxas says is read from the other one.
    with Console(stderr=True).status("Compiling ...") as status:
        for variant, found in reports():
            status.update(f"Compiled {found.name}")
            faults = found.faults(variant)
            counts = (found.registers, found.spilled_bytes, found.shared_bytes, found.code_bytes)
            table.add_row(
                found.name,
                *(f"{count:,}" for count in (*counts, found.products)),
                f"{found.seconds:.1f}",
                "[red]bad[/red]" if faults else "[green]good[/green]",
            )
            seconds += found.seconds
            bad += [f"{found.name}: {'; '.join(faults)}"] if faults else []
    console.print(table)
    for line in bad:
        console.print(line, style="red", markup=False)
    console.print(f"{seconds:.1f} s in all.")
    return not bad


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
