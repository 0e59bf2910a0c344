"""Prints which files and functions are over their size budget. A report, never a failure.

Over budget means: say why in the change, or split.
"""

import ast
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "longdelta"
FILE_LINES = 400
FUNCTION_LINES = 60
KERNEL_LINES = 250


class Size(NamedTuple):
    name: str
    lines: int
    budget: int


def function_sizes(source: str, where: str, budget: int) -> list[Size]:
    """Lines of every function in source, its decorators and docstring included."""
    sizes = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines = (node.end_lineno or node.lineno) - first + 1
            sizes.append(Size(f"{where}:{node.name}", lines, budget))
    return sizes


def package_sizes(package: Path) -> list[Size]:
    """Sizes of all files and functions under a folder, largest first."""
    sizes = []
    for path in sorted(package.rglob("*.py")):
        source, where = path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()
        device_code = where.startswith(("kernels/gluon/", "kernels/triton/"))
        sizes.append(Size(where, len(source.splitlines()), FILE_LINES))
        budget = KERNEL_LINES if device_code else FUNCTION_LINES
        sizes += function_sizes(source, where, budget)
    return sorted(sizes, key=lambda size: -size.lines)


def report(sizes: list[Size]) -> str:
    """One line a finding, and a last line with the totals."""
    over = [size for size in sizes if size.lines > size.budget]
    lines = [f"{size.lines:5d} lines, budget {size.budget:3d}: {size.name}" for size in over]
    return "\n".join(
        [*lines, f"sizes: {len(over)} of {len(sizes)} files and functions over budget"]
    )


if __name__ == "__main__":
    print(report(package_sizes(PACKAGE)))
