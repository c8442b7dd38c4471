"""Programs that run in pods and on hosts: what each may import, and that its joined text is the same program."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lockstep.platforms import inpod, onhost
from lockstep.platforms.inpod import source_of

MODULES = [
    f"{folder.__name__}.{path.stem}"
    for folder in (inpod, onhost)
    for path in sorted(Path(str(folder.__file__)).parent.glob("*.py"))
    if path.stem != "__init__"
]


def text_of(module: str) -> str:
    return source_of(import_module(module)).decode()


@pytest.mark.parametrize("module", MODULES)
def test_a_program_imports_only_the_standard_library(module: str) -> None:
    imports = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text_of(module), feature_version=(3, 10)))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
    }
    assert imports - ({"torch"} if module == f"{onhost.__name__}.gputest" else set()) <= sys.stdlib_module_names, (
        "that one asks torch itself"
    )


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_are_joined_define_no_name_twice(module: str) -> None:
    names = [
        name
        for node in ast.parse(text_of(module)).body
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else [target.id for target in node.targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
    ]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
