"""The node's log: this process's standard output, written by a thread so that a reader who stops reading stops nobody else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from lockstep_gang.contract.text import printable_line

if TYPE_CHECKING:
    from lockstep_gang.agent.link.journal import Journal

LINES_WAITING_MAX = 20_000
TAIL_LINES = 100


class Console:
    """Takes lines at any speed. When the reader is that far behind, lines are left out and their number is said."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.journal: Journal | None = None
        """Gets every line too, for those who look when this process's output is gone."""
        self._waiting: deque[str] = deque()
        self._dropped = 0
        self._closed = False
        self._news = threading.Condition()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        self._tail.append(line)
        if self.journal is not None:
            self.journal.write(line)
        with self._news:
            if len(self._waiting) >= LINES_WAITING_MAX:
                self._dropped += 1
            else:
                self._waiting.append(line)
            self._news.notify()

    def say(self, text: str) -> None:
        """A line of Lockstep's own, and no more than one: what it quotes of a script's exception may look like others."""
        self.write(f"[lockstep] {printable_line(text)}")

    def begin_attempt(self, attempt: int) -> None:
        """Lines are of this attempt from here on."""
        if self.journal is not None:
            self.journal.begin_attempt(attempt)

    def tail(self) -> tuple[str, ...]:
        """The last lines, for the report; each at most 1,000 characters."""
        return tuple(line[:1000] for line in self._tail)

    def close(self, seconds: float) -> None:
        """Write what is waiting, but not longer than this."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(seconds)
        if self.journal is not None:
            self.journal.close(seconds)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closed)
                lines, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._dropped = 0
            if dropped:
                lines.append(f"[lockstep] {dropped} lines left out: this log is read too slowly")
            if not lines:
                return
            self._put("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more; the job goes on
            while data:
                data = data[os.write(self._descriptor, data) :]
