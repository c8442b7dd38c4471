"""NO_COLOR in a real terminal, and completion as shells ask for it."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cli.shared import terminal
from lockstep.platforms.files import meter as meter_module
from lockstep.platforms.files.transfer import TransferProgress
from support.checkout import ROOT
from support.in_process import lockstep
from unit.virtual_time import VirtualClock

VERBS = [["cluster", "list"], ["render", "-f", "manifests/samples/trainingjob.yaml", "--explain"], ["get", "--help"]]


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
def test_verbs_are_completed(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = {"bash": {"COMP_WORDS": "lockstep sta", "COMP_CWORD": "1"}}.get(shell, {"_TYPER_COMPLETE_ARGS": "lockstep sta"})
    for name, value in {"_LOCKSTEP_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **typed}.items():
        monkeypatch.setenv(name, value)
    done = lockstep()
    assert done.returncode == 0
    assert "stacks" in done.stdout
    assert "resume" not in done.stdout


def ended(command: list[str], **options: Any) -> tuple[int, str]:
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "verb", [["cluster", "list"], ["render", "-f", "manifests/samples/trainingjob.yaml", "-o", "json"]], ids=["lines", "json"]
)
def test_an_output_that_takes_no_more_is_an_error_in_one_sentence(verb: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        code, errors = ended([sys.executable, "-m", "lockstep.cli.main", *verb], stdout=full)
    assert (code, errors) == (1, "lockstep: standard output can't be written: No space left on device\n")


@pytest.mark.parametrize("closed", ["1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
def test_an_output_that_is_closed_leads_nowhere(closed: str) -> None:
    assert ended(["sh", "-c", f'exec "$0" -m lockstep.cli.main cluster list {closed}', sys.executable]) == (0, "")


def test_a_character_that_the_locale_does_not_have_comes_out_as_an_escape() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    program = (
        "import sys; from lockstep.cli.main import open_streams; from lockstep.platforms.output import put; open_streams(); put('1 → 2')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 \\u2192 2\n", "")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> tuple[VirtualClock, list[float]]:
    """A clock, and when a line was shown."""
    clock, shown = VirtualClock(0.0), list[float]()
    monkeypatch.delenv("NO_COLOR", raising=False)
    for module in (terminal, meter_module):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "tell", lambda line: shown.append(clock.now))
        monkeypatch.setattr(module, "put_over", lambda line, width: shown.extend([clock.now] if line else []))
    return clock, shown


@pytest.mark.parametrize(("at_a_terminal", "seconds"), [(True, [0.2, 1.2, 2.2, 3.2]), (False, [10, 20, 30, 40])])
def test_what_is_waited_for_is_said_at_once_at_a_terminal_and_elsewhere_every_ten_seconds(
    shown: tuple[VirtualClock, list[float]], monkeypatch: pytest.MonkeyPatch, at_a_terminal: bool, seconds: list[float]
) -> None:
    clock, lines = shown

    def wait(nap: float) -> bool:
        clock.sleep(nap)
        return len(lines) == 4

    over = SimpleNamespace(wait=wait, set=lambda: None)
    threading = SimpleNamespace(Event=lambda: over, Thread=lambda target, **_: SimpleNamespace(start=target, join=lambda: None))
    monkeypatch.setattr(terminal, "threading", threading)
    monkeypatch.setattr("sys.stderr.isatty", lambda: at_a_terminal, raising=False)
    with terminal.waiting("it comes"):
        pass
    assert lines == pytest.approx(seconds)


@pytest.mark.parametrize(("at_a_terminal", "seconds"), [(True, 0.2), (False, 10.0)])
def test_a_transfer_says_five_times_a_second_at_a_terminal_how_far_it_is_and_elsewhere_every_ten_seconds(
    shown: tuple[VirtualClock, list[float]], monkeypatch: pytest.MonkeyPatch, at_a_terminal: bool, seconds: float
) -> None:
    clock, lines = shown
    monkeypatch.setattr("sys.stderr.isatty", lambda: at_a_terminal, raising=False)
    meter = meter_module.Meter()
    meter.transfers = {"x-0": TransferProgress(expected=100, passed=1)}
    for _ in range(210):
        clock.sleep(seconds / 50)
        meter.changed()
    assert lines == pytest.approx([seconds * number for number in range(1, 5)], rel=0.05)
