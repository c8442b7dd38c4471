"""Programs by their first line: those that Python can't run are known, those that it can aren't refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep_gang.agent.preflight.files import path_facts
from lockstep_gang.contract.preflight import ExpectedPath, Kind
from lockstep_spec.files import other_interpreter, shebang

SHELL = "set -e\nif [ -f x ]; then echo 1; fi\n"
ROWS = [
    ("#!/bin/bash\n" + SHELL, "bash"),
    ("#!/bin/sh -e\n" + SHELL, "sh"),
    ("#! /usr/bin/env bash\n" + SHELL, "bash"),
    ("#!/usr/bin/env -S FOO=1 bash -x\n" + SHELL, "bash"),
    ("#!/usr/bin/env\tbash\n" + SHELL, "bash"),
    ("#!/bin/bash\n" + SHELL + "#" * 300_000, ""),  # (too long to be read as Python)
    ("#!/bin/bash\r\n" + SHELL, "bash"),
    ("#!/usr/bin/perl\nuse strict; my $x = 1;\n", "perl"),
    ("#!/usr/bin/env python3\nprint(1)\n", ""),
    ("#!/opt/conda/bin/python3.11 -u\nprint(1)\n", ""),
    ("#!/usr/bin/env -S uv run --script\nprint(1)\n", ""),
    ("#!/bin/sh\n''':'\nexec python3 \"$0\" \"$@\"\n'''\nprint(1)\n", ""),  # as pip writes a long first line
    ("#!/usr/bin/env python3\nprint 'Python 2'\n", ""),
    (SHELL, ""),
    ("#!\n", ""),
    ("", ""),
]


@pytest.mark.parametrize(("text", "expected"), ROWS)
def test_only_a_file_that_python_cannot_read_is_another_interpreter_s(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "train"
    file.write_bytes(text.encode())
    assert other_interpreter(file) == expected
    facts = path_facts(
        [ExpectedPath(field, "train", Kind.FILE) for field in ("spec.script.path", "spec.training.data.path")], str(tmp_path)
    )
    assert [fact.interpreter for fact in facts] == [expected, ""]


def test_the_kernel_s_path_and_the_name_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"#!/usr/bin/env -S FOO=1 bash -x\n")
    assert shebang(tmp_path / "a") == ("/usr/bin/env", "bash")
    assert shebang(tmp_path / "absent") == ("", "")
