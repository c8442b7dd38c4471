"""Processes by the kernel's own means: subreaper, death signal, sessions, waitpid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True)
class Ended:
    """A child that ended, by an exit code or by a signal's name."""

    pid: int
    exit_code: int | None
    signal: str | None


def become_subreaper() -> None:
    """Orphans of ranks become children of this process instead of the machine's first one. Raises OSError."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start_process(command: Sequence[str], folder: str, environment: Mapping[str, str], output: int) -> int:
    """The process's id. It leads its own session, writes both streams to `output`, and is killed by the kernel if this process ends.

    Raises OSError when the command can't be started.
    """
    parent = os.getpid()

    def die_with_parent() -> None:  # between fork and exec: nothing but system calls
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True, preexec_fn=die_with_parent,  # noqa: PLW1509 (there is no other way to a death signal)
    )  # fmt: skip
    process.returncode = 0  # `ended_children` is the one who waits: Popen must not
    return process.pid


def ended_children(leaders: Mapping[int, object]) -> Iterator[Ended]:
    """Children that ended since the last time, orphans too. The process group of a leader is killed before its number is free again."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        if found.si_pid in leaders:
            send_to_group(found.si_pid, signal.SIGKILL)
        _, status = os.waitpid(found.si_pid, 0)
        code = os.waitstatus_to_exitcode(status)
        yield Ended(found.si_pid, code if code >= 0 else None, signal_name(-code) if code < 0 else None)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"  # real-time signals have no name in Python


def send_to_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_strays(variable: str) -> None:
    """SIGKILL every process with `variable` (NAME=value) in its environment: descendants of ranks that left their session."""
    marker = variable.encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if marker in (folder / "environ").read_bytes().split(b"\0"):
                    send(int(folder.name), signal.SIGKILL)
