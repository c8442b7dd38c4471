"""Output of this machine's own commands. Python 3.6 reads it, too."""

from __future__ import annotations

import subprocess

COMMAND_SECONDS = 5.0


def output(*command: str, seconds: float = COMMAND_SECONDS) -> str:
    """Return the output of a command; '' when it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, check=False,
            errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
