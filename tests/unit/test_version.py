"""The command under its two names."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [["--version"], ["version", "--client"], ["version", "--client", "-o", "json"]])
def test_the_version_needs_no_cluster(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.setattr("sys.argv", ["lockstep", *arguments])
    try:
        code: object = main()
    except SystemExit as ended:
        code = ended.code
    assert code in (0, None) and capsys.readouterr().out.strip()


def test_a_script_gets_versions_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep", "version", "--client", "-o", "json"])
    with contextlib.suppress(SystemExit):
        main()
    assert list(json.loads(capsys.readouterr().out)) == ["lockstep"]


def test_it_is_a_plugin_of_kubectl_and_oc_too() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl-lockstep"] == scripts["lockstep"]
    assert (Path(sys.prefix) / "bin" / "kubectl-lockstep").exists()


def test_a_help_page_does_not_wait_for_models_and_clients() -> None:
    code = "import sys, lockstep.cli.main; print([m for m in ('pydantic', 'kubernetes', 'torch', 'aiohttp', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
