"""This machine: which of its starts it is in, and how long it has slept since then."""

from __future__ import annotations

import time
from pathlib import Path

from lockstep_machine.readings import file_words

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps, unlike `time.monotonic`. Only Linux has it."""


def boot_id() -> str:
    """A text that is another one after each start of the machine; empty where nobody knows."""
    return file_words(BOOT_ID)


def seconds_since_boot() -> float:
    """Seconds of a clock that never jumps, and that counts the time in which the machine slept."""
    return time.clock_gettime(_CLOCK)


def slept_seconds() -> float:
    """Seconds that the machine has slept (suspended) since it started."""
    return max(0.0, seconds_since_boot() - time.clock_gettime(time.CLOCK_MONOTONIC))
