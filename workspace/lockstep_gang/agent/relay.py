"""A rank's output, line by line into the node's log, with the rank before every line."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable

from lockstep_gang.contract.text import printable as printable_text
from lockstep_gang.lifecycle.causes import TIMED_OUT

LINE_BYTES_MAX = 8192
LAST_LINES = 20
LAST_LINE_CHARACTERS = 1000
CAPTURED_LINES = 20_000  # stacks of 100 threads, 100 frames each, and what else is written meanwhile
_READ_BYTES = 65536
_READS = 16  # more than a pipe holds; a rank that floods its output must not keep its agent from all else
_CRASH = "Fatal Python error: "
"""faulthandler's first word of a signal."""


def printable(raw: bytes) -> str:
    """Text that can do nothing to a terminal or a log reader: other bytes and control characters become escapes."""
    return printable_text(raw.decode("utf-8", "backslashreplace"))


class Relay:
    """Cuts a stream of bytes into lines; a carriage return ends one too, since progress bars have nothing else."""

    def __init__(self, rank: int, write: Callable[[str], None]) -> None:
        self._prefix = f"[rank {rank}] "
        self._write = write
        self._rest = b""
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._timed_out: str | None = None
        self._crashed = False
        self.captured: list[str] | None = None
        """Set to a list: lines go there and nowhere else, as long as there is room."""

    @property
    def last_lines(self) -> list[str]:
        """After a crash also the line that told of a collective's timeout: faulthandler's stacks come after it, and are longer."""
        lines = list(self._last)
        if self._crashed and self._timed_out is not None and self._timed_out not in lines:
            return [self._timed_out, *lines[1:]]
        return lines

    def feed(self, data: bytes) -> None:
        *lines, self._rest = re.split(rb"\r\n|\n|\r", self._rest + data)
        for line in lines:
            self._line(line)
        while len(self._rest) > LINE_BYTES_MAX:
            self._line(self._rest[:LINE_BYTES_MAX])
            self._rest = self._rest[LINE_BYTES_MAX:]

    def finish(self) -> None:
        """The stream has ended: what is left is a line too."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""

    def note(self, text: str, *, remember: bool) -> None:
        """A line from elsewhere than the stream, printable; `remember`: it belongs to the rank's last lines."""
        if remember:
            self._remember(text)
        self._write(self._prefix + text)

    def _remember(self, text: str) -> None:
        self._last.append(text[:LAST_LINE_CHARACTERS])
        if TIMED_OUT.search(text):
            self._timed_out = text[:LAST_LINE_CHARACTERS]
        self._crashed |= text.startswith(_CRASH)

    def _line(self, raw: bytes) -> None:
        if not raw.strip():
            return
        for start in range(0, len(raw), LINE_BYTES_MAX):
            text = printable(raw[start : start + LINE_BYTES_MAX])
            if self.captured is not None:
                if len(self.captured) < CAPTURED_LINES:
                    self.captured.append(text)
                continue
            self._remember(text)
            self._write(self._prefix + text)


def drain(descriptor: int, relay: Relay) -> bool:
    """Feed what a pipe holds, without waiting, from a non-blocking descriptor. False: the stream has ended."""
    for _ in range(_READS):
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        relay.feed(data)
    return True
