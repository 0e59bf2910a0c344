import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("sizes", Path(__file__).with_name("sizes.py"))
assert SPEC is not None
assert SPEC.loader is not None
sizes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sizes)

SHORT = '@cache\ndef short(x):\n    """Doc."""\n    return x\n\n\n'
SOURCE = SHORT + "def long(x):\n" + "    x += 1\n" * 9


def test_function_sizes_count_decorators_and_docstrings() -> None:
    found = {size.name: size.lines for size in sizes.function_sizes(SOURCE, "a.py", 5)}
    assert found == {"a.py:short": 4, "a.py:long": 10}


def test_report_lists_only_what_is_over_budget() -> None:
    text = sizes.report(sizes.function_sizes(SOURCE, "a.py", 5))
    assert text.splitlines() == [
        "   10 lines, budget   5: a.py:long",
        "sizes: 1 of 2 files and functions over budget",
    ]


def test_package_sizes_give_device_code_the_kernel_budget(tmp_path: Path) -> None:
    for folder in ("kernels/gluon", "kernels/eager"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "scan.py").write_text(SOURCE, encoding="utf-8")
    budgets = {size.name: size.budget for size in sizes.package_sizes(tmp_path)}
    assert budgets["kernels/gluon/scan.py:long"] == sizes.KERNEL_LINES
    assert budgets["kernels/eager/scan.py:long"] == sizes.FUNCTION_LINES
    assert budgets["kernels/gluon/scan.py"] == sizes.FILE_LINES
