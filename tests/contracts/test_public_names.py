"""The public surface: adding, removing or renaming a name is a decision, so it is written here."""

import importlib
import inspect
import re

import pytest

import longdelta

OPS = ["causal_conv1d", "chunk_gated_delta_rule", "gdn_backward", "gdn_forward"]
QUERIES = ["bytes_needed", "support"]
ERRORS = ["InvalidInput", "NotYet", "UnsupportedProblem"]
TOOLS = ["checkpoint"]
SUBMODULES = ["distributed", "nn", "reference", "runtime", "testing"]

SHAPE = re.compile(r"\[[A-Z0-9][A-Za-z0-9 ,+*/-]*\]")


def test_public_names_are_the_frozen_list() -> None:
    names = set(longdelta.__all__) - set(SUBMODULES) - {"__version__"}
    assert sorted(names) == sorted(OPS + QUERIES + TOOLS + ERRORS)


def test_public_names_are_listed_by_dir_and_unknown_names_are_refused() -> None:
    assert set(longdelta.__all__) <= set(dir(longdelta))
    with pytest.raises(AttributeError, match="no_such_name"):
        longdelta.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", SUBMODULES)
def test_public_submodule_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(importlib.import_module(f"longdelta.{name}"))


@pytest.mark.parametrize("name", OPS)
def test_public_op_documents_shapes_and_raises(name: str) -> None:
    doc = inspect.getdoc(getattr(longdelta, name)) or ""
    assert SHAPE.search(doc), f"{name}: give shapes, as [B, T, H, K]"
    assert "Raises" in doc, f"{name}: say what it raises"


@pytest.mark.parametrize("name", QUERIES + TOOLS)
def test_public_query_documents_raises_or_source(name: str) -> None:
    doc = inspect.getdoc(getattr(longdelta, name)) or ""
    assert SHAPE.search(doc) or "Raises" in doc or "Source" in doc, name


@pytest.mark.parametrize("name", ERRORS)
def test_public_error_has_its_own_docstring(name: str) -> None:
    error = getattr(longdelta, name)
    assert issubclass(error, Exception)
    assert error.__doc__


def test_invalid_input_is_a_value_error() -> None:
    assert issubclass(longdelta.InvalidInput, ValueError)
