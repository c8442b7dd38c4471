"""Readings of a host that several programs there take: its C library, Lockstep's files, and the process that keeps an agent; and the lock
of starts.

Python 3.6 reads it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep_machine.commands import output
from lockstep_machine.readings import start_ticks, user_name


def state_folder() -> Path:
    """Return the folder with one folder for each job."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "lockstep" / "jobs"


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def lingers() -> bool:
    """Return True if this user's units go on without a login."""
    linger = output("loginctl", "show-user", user_name(), "--property=Linger", "--value").strip()
    return {"yes": True, "no": False}.get(linger, Path("/var/lib/systemd/linger", user_name()).exists())


def glibc() -> str:
    """Return the version of the C library; '' where it is another one."""
    with contextlib.suppress(OSError, AttributeError):
        version = ctypes.CDLL(None).gnu_get_libc_version
        version.restype = ctypes.c_char_p
        return str(version().decode())
    return ""


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
