"""What may import what, where import-linter cannot see it: submodules of other packages."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
PACKAGE = SOURCE / "longdelta"
COLLECTIVES = "distributed/collectives.py"

# Stands in for a machine without Triton and without the plotting extra.
WITHOUT = """
import json, sys
sys.path.insert(0, {source!r})

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter; its error is part of the failure."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def uses_of_torch_distributed(source: str) -> list[int]:
    """Lines that import torch.distributed or reach it as an attribute."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        if any(f"{name}.".startswith("torch.distributed.") for name in names):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_gather",
        "from torch.distributed.tensor import DTensor",
        "import torch\ndef f():\n    return torch.distributed.get_rank()",
    ],
)
def test_torch_distributed_check_sees_every_spelling(source: str) -> None:
    assert uses_of_torch_distributed(source)


@pytest.mark.parametrize(
    "source", ["import torch", "from longdelta import distributed", "x.distributed"]
)
def test_torch_distributed_check_leaves_other_names_alone(source: str) -> None:
    assert uses_of_torch_distributed(source) == []


def test_torch_distributed_is_used_only_in_collectives() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := uses_of_torch_distributed(path.read_text(encoding="utf-8")))
    }
    assert set(found) <= {COLLECTIVES}, found


def test_package_trains_without_triton_and_matplotlib() -> None:
    code = (
        WITHOUT.format(source=str(SOURCE), absent=("triton", "matplotlib"))
        + """
import torch, longdelta
names = [name for name in longdelta.__all__ if getattr(longdelta, name) is not None]
import longdelta.nn, longdelta.testing, longdelta.reference, longdelta.kernels.eager
torch.set_num_threads(1)
q, k, v = (torch.ones(1, 70, 1, 8, requires_grad=True) for _ in "qkv")
g, beta = torch.full((1, 70, 1), -0.5), torch.zeros(1, 70, 1)
o, state = longdelta.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
(o.sum() + state.sum()).backward()
print(json.dumps({
    "names": names,
    "o": o.abs().max().item(),
    "dv": v.grad.abs().max().item(),
    "blocked": sorted(set(sys.modules) & {"triton", "matplotlib"}),
}))
"""
    )
    seen = json.loads(run_python(code).splitlines()[-1])
    assert seen["names"]
    # beta = 0 writes nothing into the state: zero output, zero gradient of v, exactly.
    assert (seen["o"], seen["dv"], seen["blocked"]) == (0.0, 0.0, [])


def test_import_loads_no_command_line_and_no_plotting() -> None:
    code = WITHOUT.format(source=str(SOURCE), absent=()) + (
        "import longdelta\n"
        "print(json.dumps(sorted(set(sys.modules) & {'typer', 'rich', 'matplotlib'})))"
    )
    assert json.loads(run_python(code)) == []


def test_source_files_are_ascii() -> None:
    bad = [path.name for path in PACKAGE.rglob("*.py") if not path.read_bytes().isascii()]
    assert bad == []
