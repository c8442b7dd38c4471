"""Real English text of two styles that needs no download: docstrings of the standard library, and its reference manual."""

from __future__ import annotations

import ast
import importlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__", "turtledemo"}
SHORTEST_CHARACTERS = 80


def standard_library_docstrings() -> list[str]:
    """Docstrings with at least a sentence or two, in a fixed order, without duplicates."""
    found: dict[str, None] = {}
    for path in _sources(Path(sysconfig.get_paths()["stdlib"])):
        for text in _docstrings(path):
            if len(text) >= SHORTEST_CHARACTERS and text.isascii():
                found[text] = None
    return list(found)


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if not EXCLUDED & set(path.relative_to(folder).parts):
            yield path


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def reference_manual() -> list[str]:
    """Paragraphs of prose of the language reference (pydoc's topics), in a fixed order."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    found: dict[str, None] = {}
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(block.split())
            if len(text) >= SHORTEST_CHARACTERS and text.isascii() and text[0].isalpha() and text[-1] in ".:":
                found[text] = None
    return list(found)
