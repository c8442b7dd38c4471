"""The signals that end a verb."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

ENDS = """
import os, signal, sys
from lockstep.cli.signals import ending_like_ctrl_c
try:
    with ending_like_ctrl_c() as received:
        os.kill(os.getpid(), signal.{name})
        signal.pause()
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    sys.exit(128 + received[0])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_change_the_exit_code_of_a_verb_that_has_cleaned_up(number: signal.Signals) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS.format(name=number.name)], timeout=60, check=False)
    assert done.returncode == 128 + number
