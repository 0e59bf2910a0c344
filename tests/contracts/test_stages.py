"""A stage is one word everywhere: reference function, function of every backend, test file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "longdelta"
STAGES = [
    "activate",
    "prepare",
    "summarize",
    "fold",
    "scan",
    "adjoint_summarize",
    "adjoint_scan",
    "gradients",
    "adjoint_activate",
]


def functions_in(folder: Path) -> set[str]:
    """Names of the module-level functions of all files in a folder."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("stage", STAGES)
def test_stage_has_a_function_of_its_name(stage: str) -> None:
    assert stage in functions_in(PACKAGE / "reference")
    assert stage in functions_in(PACKAGE / "kernels" / "eager")


@pytest.mark.parametrize("stage", STAGES)
def test_stage_has_a_test_file_with_tests(stage: str) -> None:
    path = ROOT / "tests" / "kernels" / f"test_{stage}.py"
    assert path.is_file()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    ]
    assert tests
