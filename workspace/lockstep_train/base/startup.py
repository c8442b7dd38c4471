"""Seconds that each part of a start takes, from the process's own start to the end of its first step: the cost of a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/self/stat")


def process_start(stat: Path = STAT) -> float:
    """Start of this process, on the clock since boot: the operating system's word, so that Python's own start is in it."""
    fields = stat.read_text().rpartition(")")[2].split()  # the name in parentheses may hold spaces
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StartUp:
    """Parts in the order in which they end; `done` ends one and begins the next. The same part may come again: its times add up."""

    def __init__(self, began: float | None = None, clock: Callable[[], float] = since_boot) -> None:
        self._clock = clock
        self._began = self._last = process_start() if began is None else began
        self._parts: dict[str, float] = {}
        self._finished = False

    def done(self, part: str) -> None:
        now = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def finish(self, part: str) -> dict[str, float] | None:
        """End the last part; seconds of each, to hundredths, and of all as `total`. None, and nothing done, after the first time."""
        if self._finished:
            return None
        self._finished = True
        self.done(part)
        return {name: round(seconds, 2) for name, seconds in {**self._parts, "total": self._last - self._began}.items()}


def startup_line(seconds: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if name != "total" and value >= 0.05)
    return f"Start-up: {seconds['total']:.1f} s to the end of the first step ({parts})"
