"""The command under its two names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.cli.main import HINTS, main
from support.checkout import ROOT


def test_the_version_needs_no_cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.setattr("sys.argv", ["lockstep", "--version"])
    try:
        code: object = main()
    except SystemExit as ended:
        code = ended.code
    assert code in (0, None) and capsys.readouterr().out.strip()


VERSION_AND_MODULES = """\
import sys
from lockstep.cli.main import main
sys.argv[1:] = ["--version"]
try:
    main()
finally:
    print([name for name in sys.modules if name.startswith("lockstep.cli.jobs")])
"""


def test_the_version_waits_for_no_verb() -> None:
    done = subprocess.run([sys.executable, "-c", VERSION_AND_MODULES], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_it_is_a_plugin_of_kubectl_and_oc_too() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl-lockstep"] == scripts["lockstep"]
    assert (Path(sys.prefix) / "bin" / "kubectl-lockstep").exists()


def test_a_help_page_does_not_wait_for_models_and_clients() -> None:
    code = "import sys, lockstep.cli.main; print([m for m in ('pydantic', 'kubernetes', 'torch', 'aiohttp', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def lockstep(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr("sys.argv", ["lockstep", *words])
    try:
        return main()
    except SystemExit as ended:
        return ended.code


def test_without_a_cluster_its_own_version_is_printed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    assert lockstep(monkeypatch, "version") == 2
    printed = capsys.readouterr()
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert printed.out.startswith(f"lockstep     {number}")
    assert "KUBECONFIG names /nonexistent" in printed.err


@pytest.mark.parametrize("words", [words.split() for words in HINTS])
def test_a_word_of_another_tool_is_answered_with_what_to_type_here(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert lockstep(monkeypatch, *words, "x") == 2
    errors = capsys.readouterr().err
    assert HINTS[" ".join(words)] in errors and "Did you mean" not in errors


def test_no_type_stands_beside_what_is_only_there_or_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["get"], ["run"], ["adapter"], ["adapter", "get"], ["cluster", "calibrate"]):
        assert lockstep(monkeypatch, *words, "--help") == 0
        page = capsys.readouterr().out
        assert "bool" not in page and "--help" in page
