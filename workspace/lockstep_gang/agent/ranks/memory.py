"""Limits of this container by its cgroup (version 1 or 2): processes that the kernel killed to free memory, and how many there may be."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from lockstep_gang.contract.messages import OutOfMemory
from lockstep_machine.limits import control_groups, memory_limit
from lockstep_machine.readings import file_words

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class MemoryGroup:
    """The cgroup of this process, whose ranks are in it too."""

    def __init__(self, groups: Path = GROUPS, own: Path = OWN) -> None:
        self._folder = next((folder for folder in control_groups("memory", groups, own) if _kills(folder) is not None), None)
        self._kills = self._count()

    def killed(self, peak_bytes: int) -> OutOfMemory | None:
        """Return the limit and the peak if the kernel has killed a process since the last call. Call it when a rank has ended, with its
        memory's peak.
        """
        before, self._kills = self._kills, self._count()
        if self._folder is None or self._kills <= before:
            return None
        return OutOfMemory(memory_limit(self._folder), peak_bytes or None)

    def _count(self) -> int:
        return (_kills(self._folder) or 0) if self._folder is not None else 0


def process_limit(groups: Path = GROUPS, own: Path = OWN) -> str:
    """Return words for the nearest limit of processes and threads that holds here; empty if none is known."""
    texts = [file_words(folder / "pids.max") for folder in control_groups("pids", groups, own)]
    limits = [(int(text), "pids.max of its cgroup") for text in texts if text.isdigit()]
    of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if of_user != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append((of_user, "ulimit -u of its user"))
    return "{1} is {0}".format(*min(limits)) if limits else ""


def _kills(folder: Path) -> int | None:
    for name in ("memory.events", "memory.oom_control"):
        for line in file_words(folder / name).splitlines():
            word, _, number = line.partition(" ")
            if word == "oom_kill" and number.isdigit():
                return int(number)
    return None
