"""Checks of options that several commands have, made before any work starts."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from longdelta.errors import InvalidInput
from longdelta.plan.checks import LAYOUTS, check_choice

CUT_LAYOUTS = tuple(name for name in LAYOUTS if name != "fragments")
"""The layouts that a command can name: explicit fragments are for Python alone."""
MOST_TOKENS = 2**31
MOST_DOCUMENTS = 2**16
_COUNT = re.compile(r"([0-9]{1,20})(?:x([0-9]{1,20}))?")


def check_layout(layout: str) -> None:
    """Raises unless the layout is one that needs no fragments."""
    check_choice("layout", layout, CUT_LAYOUTS)


def check_picture(name: str, path: Path) -> None:
    """Raises unless a PNG can be written there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput(f"{name} must be left out without matplotlib; install it to draw")
    folder = path.absolute().parent
    if path.suffix != ".png" or not folder.is_dir() or path.is_dir():
        raise InvalidInput(f"{name} must be a .png in a folder that exists, got {path}; change it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidInput(f"{name} must be a file that may be written, got {path}; change it")


def document_lengths(text: str) -> list[int]:
    """Tokens of each document: numbers with commas between, `64x4096` for 64 equal documents.

    >>> document_lengths("100, 3x20")
    [100, 20, 20, 20]
    """
    parts = [_COUNT.fullmatch(part) for part in text.replace(" ", "").split(",")]
    lengths: list[int] = []
    tokens = 0
    for part in parts:
        if part is None:
            raise InvalidInput(
                "lengths must be tokens with commas between, 100,300 or 64x4096 for 64 documents "
                f"of 4096, got {shown(text)}"
            )
        count, length = (int(part[1]), int(part[2])) if part[2] else (1, int(part[1]))
        tokens += count * length
        if len(lengths) + count > MOST_DOCUMENTS or tokens > MOST_TOKENS:
            raise InvalidInput(
                f"lengths must be at most {MOST_DOCUMENTS:,} documents and {MOST_TOKENS:,} tokens "
                f"in all, got {shown(text)}"
            )
        lengths += [length] * count
    return lengths


def two_heads(text: str) -> tuple[int, int]:
    """q/k heads and value heads.

    >>> two_heads("16,48")
    (16, 48)
    """
    parts = re.fullmatch(r"([1-9][0-9]{0,5}),([1-9][0-9]{0,5})", text.replace(" ", ""))
    if parts is None or int(parts[2]) % int(parts[1]):
        raise InvalidInput(
            "heads must be two integers like 16,48, the second a multiple of the first, "
            f"got {shown(text)}"
        )
    return int(parts[1]), int(parts[2])


def shown(text: str) -> str:
    """A text for a message, its middle left out where it is long."""
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}")
