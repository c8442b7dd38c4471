"""Use of this node beside what Lockstep runs: a shell that somebody uses, or a program that computes.

Only asked while no rank runs, so that whatever there is in the pod beside its first process, the agent, came in by `kubectl exec`. Use is
a session that has just begun, a terminal that was typed into or printed something, and processor time. A shell or a server that only
stands open is no use.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep_machine.readings import stat_fields

BUSY_SHARE = 0.02
"""Share of one core that counts as use. A waiting server takes less, and so does a shell in use: its terminal tells."""
_TERMINALS = 136
"""The kernel's device number of /dev/pts; eight in a row."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    """Parent's process id; 0: outside of the pod."""
    terminal: int
    """Device number; 0: none."""
    seconds: float
    """Processor time."""


class ShellActivity:
    """Use since the last time it was asked."""

    def __init__(self, proc: Path = Path("/proc"), terminals: Path = Path("/dev/pts")) -> None:
        self._proc, self._terminals = proc, terminals
        self._seconds: dict[int, float] | None = None
        self._looked_at = time.time()

    def was_used(self, now: float) -> bool:
        """Return True if anybody was at work since the last look. The first look finds only what was typed."""
        guests = self._guests()
        passed, since = max(now - self._looked_at, 0.001), self._looked_at
        before, self._seconds = self._seconds, {process.pid: process.seconds for process in guests}
        self._looked_at = now
        if any(self._terminal_was_used(process.terminal, since) for process in guests):
            return True
        if before is None:
            return False
        computed = sum(max(0.0, process.seconds - before.get(process.pid, 0.0)) for process in guests)
        came = any(process.parent == 0 and process.pid not in before for process in guests)
        return came or computed / passed > BUSY_SHARE

    def _guests(self) -> list[Process]:
        processes = map(_read, self._proc.glob("[0-9]*"))
        return [process for process in processes if process is not None and process.pid != os.getpid()]

    def _terminal_was_used(self, terminal: int, since: float) -> bool:
        """Return True if the terminal's times have moved, which they do in steps of 8 s when something is typed or printed."""
        major, minor = os.major(terminal), os.minor(terminal)
        if not _TERMINALS <= major < _TERMINALS + 8:
            return False
        try:
            times = (self._terminals / str((major - _TERMINALS) * 256 + minor)).stat()
        except OSError:
            return False
        return max(times.st_atime, times.st_mtime) > since


def _read(folder: Path) -> Process | None:
    """Read a process; None: it has ended meanwhile."""
    try:
        fields = stat_fields(folder)
        ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
        return Process(int(folder.name), int(fields[1]), int(fields[4]), ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None
