"""NO_COLOR in a real terminal, and completion as shells ask for it."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from support.checkout import ROOT

VERBS = [["clusters"], ["render", "-f", "manifests/samples/trainingjob.yaml", "--explain"], ["get", "--help"]]


def in_a_terminal(command: list[str], **variables: str) -> bytes:
    terminal, other = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "KUBECONFIG")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "200", **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli.main", *command], cwd=ROOT, stdin=other, stdout=other, stderr=other, env=environment
    )
    os.close(other)
    seen = b""
    with contextlib.suppress(OSError):  # a terminal that nobody has open any more
        while data := os.read(terminal, 4096):
            seen += data
    os.close(terminal)
    assert process.wait(60) == 0, seen
    return seen


@pytest.mark.parametrize("verb", VERBS, ids=[verb[0] for verb in VERBS])
def test_no_color_leaves_no_escape_code_in_a_terminal(verb: list[str]) -> None:
    seen = in_a_terminal(verb, NO_COLOR="1")
    assert seen.strip()
    assert b"\x1b" not in seen


def test_a_terminal_has_colors_otherwise() -> None:
    assert b"\x1b[" in in_a_terminal(VERBS[0])


def test_every_table_is_written_to_the_console_that_knows_no_color() -> None:
    cli = ROOT / "operator" / "lockstep" / "cli"
    own = cli / "shared" / "terminal.py"
    assert [path.name for path in cli.rglob("*.py") if "rich.console" in path.read_text() and path != own] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_verbs_are_completed(shell: str) -> None:
    typed = {"bash": {"COMP_WORDS": "lockstep sus", "COMP_CWORD": "1"}}.get(shell, {"_TYPER_COMPLETE_ARGS": "lockstep sus"})
    asked = {"_LOCKSTEP_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **typed}
    code = "import sys; from lockstep.cli.main import main; sys.argv = ['lockstep']; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert "suspend" in done.stdout
    assert "resume" not in done.stdout
