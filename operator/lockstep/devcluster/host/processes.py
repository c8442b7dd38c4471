"""Daemons of the embedded cluster: started in sessions of their own, found again by pid and start time, ended for sure."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.devcluster.host import cgroups
from lockstep_machine.readings import start_ticks
from lockstep_spec.files import write_durably

STOP_TIMEOUT_SECONDS = 10.0
JOIN = 'echo $$ > "$0" && exec 3>&- && cd / && exec "$@"'
"""Puts itself into a control group, lets go of the lock that says it hasn't yet, and becomes the daemon."""

TIED = ("setpriv", "--pdeathsig", "KILL")
"""The head of a command that takes long: it ends with this process, even when that is killed, and isn't left waiting for ever."""


@dataclass(frozen=True)
class Daemon:
    """A process under a name. The start time tells it from a later process that got the same pid, `command` is a digest."""

    name: str
    pid: int
    start_ticks: int
    command: str = ""


def digest(command: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]


def record(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def running(folder: Path, name: str) -> Daemon | None:
    """The daemon of this name if it is the very process that was started."""
    try:
        daemon = Daemon(name=name, **json.loads(record(folder, name).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return daemon if start_ticks(daemon.pid) == daemon.start_ticks else None


def start(folder: Path, name: str, command: Sequence[str], log: Path, cgroup: str, starting: Path) -> Daemon:
    """Start a daemon that outlives this process; its output goes to `log`, its whole process tree into `cgroup`.

    What is in that group already is killed: an earlier one whose starter died before it could write the record.
    Until the daemon has joined the group it holds the lock on the file `starting`, for `exclusive`. It inherits no other descriptor: the
    reader of a caller's pipe would wait for as long as the daemon runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    group = cgroups.create_tracking(cgroup)
    cgroups.kill(cgroup)
    with starting.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        inherited = [int(path.name) for path in Path("/proc/self/fd").iterdir() if int(path.name) > 3]
        pid = os.posix_spawn(
            "/bin/sh", ["/bin/sh", "-c", JOIN, str(group), *command], os.environ, setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, lock.fileno(), 3),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                *((os.POSIX_SPAWN_CLOSE, number) for number in inherited),
            ],
        )  # fmt: skip
    ticks = start_ticks(pid)
    if ticks is None:
        raise RuntimeError(f"{name} ended at once; see {log}")
    daemon = Daemon(name, pid, ticks, digest(command))
    state = {"pid": daemon.pid, "start_ticks": daemon.start_ticks, "command": daemon.command}
    write_durably(record(folder, name), json.dumps(state).encode())
    return daemon


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file: one process of this machine at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def shared_things(root: Path) -> AbstractContextManager[None]:
    """Hold the lock on what all clusters of this machine share: packages, binaries, images and the published code."""
    return locked(root / "devcluster.lock")


@contextmanager
def exclusive(state: Path, starting: Path) -> Iterator[None]:
    """Let one `up` or `down` at a time change what is kept in `state`, once each process that `start` made is in its control group or has
    ended.
    """
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(state / "lock"):
        with locked(starting):  # (one whose starter was killed holds it, too)
            pass
        yield


def stop(daemon: Daemon) -> None:
    """End one daemon: asked first, killed after ten seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if start_ticks(daemon.pid) != daemon.start_ticks:
            return
        os.kill(daemon.pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        while time.monotonic() < deadline and start_ticks(daemon.pid) == daemon.start_ticks:
            time.sleep(0.05)
