"""Verbs that run a module of the trainer in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lockstep.cli import checkpoint
from lockstep.cli.trainer import _run
from lockstep.platforms.output import Output

CALLER = """
import sys
from lockstep.cli import trainer
trainer.trainer_command = lambda module, arguments: [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1000)"]
try:
    trainer.run_trainer("export", [])
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_ends_the_process_without_its_traceback() -> None:
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "here\n"
    os.killpg(caller.pid, signal.SIGINT)
    _, said = caller.communicate(timeout=60)  # until both have closed the pipes
    assert (caller.returncode, said) == (130, "")


@pytest.mark.parametrize("verb", ["list", "verify", "inspect"])
@pytest.mark.parametrize("form", [["-o", "json"], ["--json"]])
def test_what_is_known_of_checkpoints_is_printed_as_the_trainer_says_it(
    verb: str, form: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "ask_trainer", lambda module, arguments: ('{"commits": 1}', 0))
    done = CliRunner().invoke(checkpoint.app, [verb, "runs/x", *form])
    assert (done.exit_code, done.output) == (0, '{"commits": 1}\n')


def test_what_the_trainer_says_of_a_folder_acts_on_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Folders may come from pods. Both streams at once, more than a pipe holds, and the exit code."""
    program = "import sys; [print('\x1b[2J\u202e' * 9, file=f) for _ in range(20000) for f in (sys.stdout, sys.stderr)]; sys.exit(3)"
    assert _run([sys.executable, "-X", "utf8", "-c", program], Output().put) == 3
    told = capsys.readouterr()
    assert told.out == told.err == ("\\x1b[2J\\u202e" * 9 + "\n") * 20000
