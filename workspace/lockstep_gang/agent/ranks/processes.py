"""Processes by the kernel's own means: subreaper, death signal, sessions, waitpid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep_machine.readings import PROC, stat_fields
from lockstep_spec.words import printable_line

LOOKS, LOOK_SECONDS = 10, 0.01
"""Looks at processes that are about to have an environment, and the time between two; some never have one."""
LEFT_MAX = 10
"""Number of programs that are named which a rank left running."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
_prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
"""The system call, on Linux only. Elsewhere (`--local` on a laptop) a killed agent can leave its ranks behind; everything else works."""


@dataclass(frozen=True)
class EndedProcess:
    """A child that ended, by an exit code or by a signal's name."""

    pid: int
    exit_code: int | None
    signal: str | None
    peak_bytes: int = 0
    """Peak of its resident memory; 0: not known."""
    left: tuple[str, ...] = ()
    """Programs that a leader that exited with 0 left running, in its group or on their own."""


def become_subreaper() -> None:
    """Make orphans of ranks children of this process instead of the machine's first one. Raises OSError."""
    if _prctl is not None and _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start_process(
    command: Sequence[str], folder: str, environment: Mapping[str, str], output: int, source: int = subprocess.DEVNULL
) -> int:
    """The process's id. It leads its own session, reads `source`, writes both streams to `output`, and is killed by the kernel if this
    process ends.

    Raises OSError when the command can't be started.
    """
    parent = os.getpid()

    def die_with_parent() -> None:  # between fork and exec: nothing but system calls
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=source, stdout=output, stderr=output,
        start_new_session=True, preexec_fn=die_with_parent,  # noqa: PLW1509 (there is no other way to a death signal)
    )  # fmt: skip
    process.returncode = 0  # `ended_children` is the one who waits: Popen must not
    return process.pid


def ended_children(leaders: Mapping[int, object]) -> Iterator[EndedProcess]:
    """Children that ended since the last time, orphans too. The process group of a leader is killed before its number is free again."""
    while True:
        try:
            child = _next_ended(leaders)
        except ChildProcessError:
            return
        if child is None:
            return
        pid, status, used, left = child
        code = os.waitstatus_to_exitcode(status)
        yield EndedProcess(pid, code if code >= 0 else None, signal_name(-code) if code < 0 else None, used.ru_maxrss * _MAXRSS_BYTES, left)


def _next_ended(leaders: Mapping[int, object]) -> tuple[int, int, resource.struct_rusage, tuple[str, ...]] | None:
    """(process id, status, what it used, what it left running) of a child that ended; None: the others run. Raises ChildProcessError when
    there is no child.
    """
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: the group is killed just after its number is free
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid in leaders:
            send_to_group(pid, signal.SIGKILL)
        return (pid, status, used, ()) if pid else None
    child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if child is None:
        return None
    left: tuple[str, ...] = ()
    if child.si_pid in leaders:
        left = _left_by(child.si_pid, leaders) if child.si_status == 0 else ()
        send_to_group(child.si_pid, signal.SIGKILL)
    return *os.wait4(child.si_pid, 0), left


def _left_by(leader: int, leaders: Mapping[int, object]) -> tuple[str, ...]:
    """Programs that run on after their leader: of its group, and orphans, which are this process's children now. Not Python's own, which
    end by themselves.
    """
    left = []
    for process in PROC.glob("[0-9]*"):
        try:
            pid, (state, parent, group) = int(process.name), stat_fields(process)[:3]
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except (OSError, ValueError):
            continue
        is_ours = int(group) == leader or (int(parent) == os.getpid() and int(group) != os.getpgrp() and int(group) not in leaders)
        if is_ours and pid not in leaders and state != "Z" and command and not any("multiprocessing" in word for word in command):
            left.append(printable_line(" ".join(word.rpartition("/")[2] for word in command[:2] if not word.startswith("-")))[:60])
    return tuple(sorted(left)[:LEFT_MAX])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"  # real-time signals have no name in Python


def send_to_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def group_is_gone(leader: int) -> bool:
    """Return True if nothing is left of the group of an ended leader. Until then no other process gets its number."""
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return True
    return False


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_strays(variable: str) -> None:
    """SIGKILL every process with `variable` (NAME=value) in its environment: descendants of ranks that left their session."""
    unknown = [int(folder.name) for folder in PROC.glob("[0-9]*") if int(folder.name) != os.getpid()]
    for _ in range(LOOKS):
        unknown = [pid for pid in unknown if not _has_been_seen(pid, variable.encode())]
        if not unknown:
            return
        time.sleep(LOOK_SECONDS)


def _has_been_seen(pid: int, marker: bytes) -> bool:
    """Kill a process that has the marker. False: it is between two programs (exec), when its environment is empty."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if not environment:
            Path(f"/proc/{pid}/exe").readlink()  # raises for a zombie and for the kernel's own
            return False
    except OSError:
        return True
    if marker in environment.split(b"\0"):
        send(pid, signal.SIGKILL)
    return True
