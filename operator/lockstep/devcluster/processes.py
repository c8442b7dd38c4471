"""Daemons of the embedded cluster: started in sessions of their own, found again by pid and start time, ended for sure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.devcluster.cgroups import join_script

STOP_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Daemon:
    """A process under a name. The start time tells it from a later process that got the same pid."""

    name: str
    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """The process's start time in clock ticks since boot; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def record(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def running(folder: Path, name: str) -> Daemon | None:
    """The daemon of this name if it is the very process that was started."""
    try:
        daemon = Daemon(name=name, **json.loads(record(folder, name).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return daemon if start_ticks(daemon.pid) == daemon.start_ticks else None


def start(folder: Path, name: str, command: Sequence[str], log: Path, cgroup: str) -> Daemon:
    """Start a daemon that outlives this process; its output goes to `log`, its whole process tree into `cgroup`."""
    folder.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*join_script(cgroup), *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/",
        )  # fmt: skip
    ticks = start_ticks(process.pid)
    if ticks is None:
        raise RuntimeError(f"{name} ended at once; see {log}")
    daemon = Daemon(name, process.pid, ticks)
    temporary = record(folder, name).with_suffix(".tmp")
    temporary.write_text(json.dumps({"pid": daemon.pid, "start_ticks": daemon.start_ticks}))
    temporary.replace(record(folder, name))
    return daemon


def stop(daemon: Daemon) -> None:
    """End one daemon: asked first, killed after ten seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if start_ticks(daemon.pid) != daemon.start_ticks:
            return
        os.kill(daemon.pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while time.monotonic() < deadline and start_ticks(daemon.pid) == daemon.start_ticks:
            time.sleep(0.05)
