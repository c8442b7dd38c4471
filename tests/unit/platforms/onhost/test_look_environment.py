"""The environment that a host names: by its own folder, since a job keeps the one that it started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.platforms.onhost.look import environment_python


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
