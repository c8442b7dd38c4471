"""Readings of a host that several programs there take: files, output of commands, and the process that keeps an agent; and the lock of starts.

Python 3.6 reads it, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMAND_SECONDS = 5.0


def state_folder() -> Path:
    """Return the folder with one folder for each job."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "lockstep" / "jobs"


def text_of(path: Any) -> str:
    """Return the text of a file; '' if it can't be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def output(*command: str) -> str:
    """Return the output of a command; '' when it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=COMMAND_SECONDS, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def start_ticks(pid: int) -> int | None:
    """Return the kernel's start time of a process, which no later process of the same number has; None: it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(rest[18])


def supervisor(name: str) -> int | None:
    """Return the pid of the process that keeps a job's agent where no systemd does, if it is the very one that was started."""
    record = object_in(state_folder() / name / "supervisor.json")
    try:
        pid, ticks = int(record["pid"]), int(record["startTicks"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return pid if start_ticks(pid) == ticks else None


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Do the block while no other start does its own."""
    state_folder().mkdir(parents=True, exist_ok=True)
    with state_folder().with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # (the agent's supervisor has the descriptor, too)
