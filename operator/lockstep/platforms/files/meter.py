"""Progress of transfers on standard error: one line that is written over on a terminal, and lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.platforms.output import put_over, tell
from lockstep_spec.words import decimal_size, duration

if TYPE_CHECKING:
    from lockstep.platforms.files.transfer import TransferProgress

ELSEWHERE_SECONDS = 10.0
TRANSFER_SECONDS = 0.2
"""At a terminal, between two lines of a transfer."""


class Meter:
    """Tells how far several transfers are, by their names, on standard error. Use `with`."""

    def __init__(self) -> None:
        self.transfers: Mapping[str, TransferProgress] = {}
        self._terminal = sys.stderr.isatty()
        self._begun = self._told = time.monotonic()
        self._width = 0

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def changed(self) -> None:
        now = time.monotonic()
        if now - self._told >= (TRANSFER_SECONDS if self._terminal else ELSEWHERE_SECONDS):
            self._told = now
            self._write(self.line(now - self._begun))

    def line(self, seconds: float) -> str:
        """`x-0 45%  x-1 43%  of 2.0 GB, 120.0 MB/s, 9s left`."""
        started = {name: transfer for name, transfer in self.transfers.items() if transfer.expected}
        if not started:
            return ""
        shares = "  ".join(f"{name} {100 * transfer.passed // transfer.expected}%" for name, transfer in started.items())
        slowest = min(started.values(), key=lambda transfer: transfer.passed / transfer.expected)
        rate = slowest.passed / max(seconds, 0.1)
        left = (slowest.expected - slowest.passed) / rate if rate else 0
        return f"{shares}  of {decimal_size(slowest.expected)}, {decimal_size(rate)}/s, {duration(left)} left"

    def _write(self, line: str) -> None:
        if self._terminal:
            put_over(line, self._width)
            self._width = len(line)
        elif line:
            tell(line)
