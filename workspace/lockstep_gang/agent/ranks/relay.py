"""A rank's output, line by line into the node's log, with the rank before every line."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable

from lockstep_gang.contract.trouble import LOST_PEER
from lockstep_gang.lifecycle.causes import TIMED_OUT
from lockstep_gang.lifecycle.tracebacks import EXCEPTION_LINE, LEFT_OUT, NOISE, ExceptionLines, says_child_ended
from lockstep_spec.words import printable

LINE_BYTES_MAX = 8192
LAST_LINES = 20
LAST_LINE_CHARACTERS = 1000
RAISED_LINES = 5
"""Number of the last lines that may be kept for an exception that came before them."""
CAPTURED_LINES = 20_000  # stacks of 100 threads, 100 frames each, and what else is written meanwhile
_READ_BYTES = 65536
_READS = 16  # more than a pipe holds; a rank that floods its output must not keep its agent from all else
OLD_SECONDS = 20.0
"""Age from which on a line doesn't tell why the rank ended: an interpreter takes a while to end, for threads that it awaits, above all on a
busy machine.
"""
WENT_ON_SECONDS = 1.0
"""Time after an exception, a child's or one that was caught, from which on another line shows that it didn't end the rank."""
_COLORS = re.compile(rb"(\x1b\[[0-9;]*[mK])")
_COLOR_END = b"\x1b[0m"
_CRASH = "Fatal Python error: "
"""First words that faulthandler writes for a signal."""


def printable_bytes(raw: bytes) -> str:
    """Text that can do nothing to a terminal or a log reader: other bytes and control characters become escapes."""
    return printable(raw.decode("utf-8", "backslashreplace"))


def colored(raw: bytes) -> str:
    """The same with the colors that the line has, and their end: no other sequence that a terminal acts on is left."""
    text, codes = (_COLORS.split(raw)[first::2] for first in (0, 1))
    colors = [code.decode() if code.endswith(b"m") else "" for code in (*codes, _COLOR_END)]
    return "".join(printable_bytes(part) + color for part, color in zip(text, colors))  # noqa: B905 (both end with the line)


UPDATE_SECONDS = 10.0
"""Time between two states of a progress bar that become lines of the log; its last state always does."""


class Relay:
    """Lines cut from a stream of bytes. What a carriage return ends is overwritten by what follows, as by a progress bar: it is thinned."""

    def __init__(self, rank: int, write: Callable[..., None]) -> None:
        """`write` gets each line, and one that has colors a second time as a terminal shows it."""
        self._prefix = f"[rank {rank}] "
        self._write = write
        self._rest = b""
        self._update = b""
        """The newest state of a progress bar, where it was not written."""
        self._updated_at: float | None = None
        self._last: deque[tuple[float, str]] = deque(maxlen=LAST_LINES)
        """The lines, each with its time (time.monotonic)."""
        self._exception_lines = ExceptionLines()
        self._raised: list[tuple[float, str]] = []
        """Entries that name the last exception and what led to it."""
        self._raised_before: list[tuple[float, str]] = []
        """Those of the exception before it that said more than that a child ended, or a peer was lost."""
        self._timed_out: str | None = None
        self._crashed = False
        self._went_on_at = 0.0
        self.captured: list[str] | None = None
        """List that gets the lines instead of the log, as long as there is room; None: the log gets them."""

    @property
    def last_lines(self) -> list[str]:
        """Last lines. After a crash, also the line about a collective's timeout: faulthandler's stacks come after it, and are longer."""
        lines = [line for _, line in self._entries()]
        if self._crashed and self._timed_out is not None and self._timed_out not in lines:
            return [self._timed_out, *lines[1:]]
        return lines

    @property
    def fresh_from(self) -> int:
        """The first of `last_lines` that may say why the rank ends now."""
        now, first = time.monotonic(), 0
        of_a_child = self._of_a_child()
        raised: float | None = None
        for index, (at, line) in enumerate(self._entries()):
            if now - at > OLD_SECONDS or at + WENT_ON_SECONDS < self._went_on_at:
                first, raised = index + 1, None
            elif raised is not None and at - raised > WENT_ON_SECONDS and not NOISE.match(line):
                first, raised = index, None
            if EXCEPTION_LINE.match(line.strip()):
                raised = None if (at, line) in of_a_child else at
        return first

    def _of_a_child(self) -> list[tuple[float, str]]:
        """Entries of the exception that ended a child, if the last one says only that a child ended: a launcher takes its time, and writes
        more than is kept.
        """
        before, last = self._raised_before, self._raised
        return before if before and says_child_ended(last[-1][1]) and last[-1][0] - before[-1][0] <= OLD_SECONDS else []

    def _entries(self) -> list[tuple[float, str]]:
        """The last lines, with those that name the last exception before them where more was written just after it, as hooks of an exit
        do.
        """
        raised = self._raised if self._raised and self._last[-1][0] - self._raised[-1][0] <= WENT_ON_SECONDS else []
        before = [entry for entry in (*self._of_a_child(), *raised) if all(entry is not last for last in self._last)]
        if not before:
            return [*self._last]
        return [*before, (before[-1][0], LEFT_OUT), *list(self._last)[len(before) + 1 :]]

    def went_on(self) -> None:
        """Note that the rank made a step: what it wrote before doesn't end it."""
        self._went_on_at = time.monotonic()

    def feed(self, data: bytes) -> None:
        *parts, self._rest = re.split(rb"(\r\n|\n|\r)", self._rest + data)
        for line, end in zip(parts[::2], parts[1::2], strict=True):
            self._overwritten(line) if end == b"\r" and self.captured is None else self._whole(line)
        while len(self._rest) > LINE_BYTES_MAX:
            self._line(self._rest[:LINE_BYTES_MAX])
            self._rest = self._rest[LINE_BYTES_MAX:]

    def finish(self) -> None:
        """Pass on what is left as a line: the stream has ended."""
        self._whole(self._rest)
        self._rest = b""

    def note(self, text: str, *, remember: bool) -> None:
        """Pass on a printable line from elsewhere than the stream; `remember`: it belongs to the rank's last lines."""
        if remember:
            self._remember(text)
        self._write(self._prefix + text)

    def _remember(self, text: str) -> None:
        entry = (time.monotonic(), text[:LAST_LINE_CHARACTERS])
        self._last.append(entry)
        begins = self._exception_lines.has_new(text)
        if begins and self._raised and not says_child_ended(self._raised[-1][1]):
            is_fresh = self._raised_before and entry[0] - self._raised_before[-1][0] <= OLD_SECONDS
            if not (is_fresh and LOST_PEER.search(self._raised[-1][1])):
                self._raised_before = self._raised
        if begins is not None:
            self._raised = [*([] if begins else self._raised), entry][-RAISED_LINES:]
        if TIMED_OUT.search(text):
            self._timed_out = text[:LAST_LINE_CHARACTERS]
        self._crashed |= text.startswith(_CRASH)

    def _whole(self, line: bytes) -> None:
        """Pass on a line that nothing overwrites; it has itself overwritten the update before it, unless it is empty."""
        line, self._update = line if line.strip() else self._update, b""
        self._line(line)

    def _overwritten(self, line: bytes) -> None:
        now = time.monotonic()
        if not line.strip():
            return
        if self._updated_at is not None and now - self._updated_at < UPDATE_SECONDS:
            self._update = line
            return
        self._updated_at, self._update = now, b""
        self._line(line)

    def _line(self, line: bytes) -> None:
        raw = _COLORS.sub(b"", line)
        if not raw.strip():
            return
        shown = [self._prefix + colored(line)] if raw != line and len(line) <= LINE_BYTES_MAX else []
        for start in range(0, len(raw), LINE_BYTES_MAX):
            text = printable_bytes(raw[start : start + LINE_BYTES_MAX])
            if self.captured is not None:
                if len(self.captured) < CAPTURED_LINES:
                    self.captured.append(text)
                continue
            self._remember(text)
            self._write(self._prefix + text, *shown)


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
