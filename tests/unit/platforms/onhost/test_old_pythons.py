"""Programs that tell a host's facts are read by Pythons that are too old for everything else, so that there is a sentence for them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from types import ModuleType

import pytest

from lockstep.platforms.hosts.fleet import old_source_of
from lockstep.platforms.inpod import carry
from lockstep.platforms.onhost import condition, install, look, starter

NEWER = {
    "removeprefix", "removesuffix", "capture_output", "strict", "missing_ok", "is_relative_to", "readlink", "text", "walk", "hmac_digest",
        "prod",
}  # fmt: skip
"""Names of methods and arguments that Python 3.6 doesn't have, and that are easily typed. `os` has some of them in every version."""


@pytest.mark.parametrize("program", [look, condition, install, carry])
def test_python_3_6_reads_it(program: ModuleType) -> None:
    tree = ast.parse(old_source_of(program), feature_version=(3, 6))
    of_os = {
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in of_os} | {
        node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg
    }
    assert used.isdisjoint(NEWER), used & NEWER
    assert not any(isinstance(node, ast.arg) and node.annotation for node in ast.walk(tree))
    subscripts = [node.value.id for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)]
    assert {"dict", "list", "set", "tuple", "type"}.isdisjoint(subscripts), "a type with parameters is no value before Python 3.9"


def test_what_is_sent_gives_the_answer_of_the_module() -> None:
    command = [sys.executable, "-I", "-c", old_source_of(condition).decode(), json.dumps({"python": sys.executable})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["libraries"]["python"].startswith("3.") and isinstance(answer["firewall"], str)


def test_a_python_that_is_too_old_is_replaced_by_the_first_newer_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "is_program", lambda path: path in ("/b", "/c"))
    assert starter.newer_python(["/a", "/b", "/c"]) == "/b"
    assert starter.newer_python(["~/none"]) == "python3"
