"""The environment that a host names: by its own folder, since a job keeps the one that it started with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.platforms.onhost.look import environment_python, version_of


def test_the_python_is_named_by_the_environment_s_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    python = tmp_path / "lockstep/env-0123456789abcdef/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "lockstep/env").symlink_to("env-0123456789abcdef")
    assert environment_python() == str(python)


def test_a_host_without_an_environment_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert environment_python() == ""


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("#!/bin/sh\necho 2.7\n", {"statedPython": [2, 7]}),
        ("#!/bin/sh\necho hello\n", {"statedProblem": "hello"}),
        ("#!/bin/sh\necho no library >&2; exit 127\n", {"statedProblem": "no library"}),
        ("#!/bin/sh\nexit 3\n", {"statedProblem": "it ended with 3"}),
        ("#!/bin/sh\nprintf '%05000d' 0\n", {"statedProblem": "0" * 300}),
        ("#!/nonesuch\n", {"statedProblem": "No such file or directory"}),
    ],
)
def test_a_stated_python_tells_its_version_or_why_it_has_none(script: str, answer: dict[str, object], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o755)
    assert version_of(str(python)) == answer


def test_this_python_tells_its_version() -> None:
    assert version_of(sys.executable) == {"statedPython": list(sys.version_info[:2])}
