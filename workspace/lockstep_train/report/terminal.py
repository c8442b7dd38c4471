"""Standard output: plain lines into a pipe or a file; on a terminal a bar for the steps, with the other lines above it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from typing import TextIO

BAR_CELLS = 20
_CLEAR = "\r\x1b[K"


class Terminal:
    """Writer of whole lines, for any thread. A stream that fails or is closed costs its lines, never the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_bar = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._bar = ""
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        with self._lock:
            self._write(f"{_CLEAR}{text}\n{self._bar}" if self._bar else f"{text}\n")

    def progress(self, done: int, total: int, text: str) -> None:
        """Show progress: a line into a pipe; on a terminal the bar's new state."""
        if not self._has_bar:
            self.line(text)
            return
        with self._lock:
            self._bar = bar(done, total, text, shutil.get_terminal_size().columns - 1)
            self._write(f"{_CLEAR}{self._bar}")

    def close(self) -> None:
        """Leave the bar where it is; what is printed next starts a line of its own."""
        with self._lock:
            if self._bar:
                self._bar = ""
                self._write("\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def bar(done: int, total: int, text: str, columns: int) -> str:
    """Bar of at most `columns` characters, so that the terminal doesn't wrap what the next state must overwrite."""
    cells = BAR_CELLS * done // max(1, total)
    return f"[{'#' * cells}{'.' * (BAR_CELLS - cells)}] {100 * done // max(1, total):3d} % | {text}"[: max(0, columns)]


def print_error(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
