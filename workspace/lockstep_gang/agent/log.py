"""The node's log: this process's standard output, and a file on the job's volume that outlives the pod, its restarts and the job.

`lockstep logs` reads the file, `logs/output/node-N.log` in the run's folder, each line `TIME ATTEMPT LINE`. When it is full it becomes
`node-N.log.1`, so that a rank that floods its output can't fill the volume. Beside it is `run.json`: this run without its variables.
A thread writes each, so that neither a reader who stops reading nor a volume that hangs or is full holds up the ranks or each other.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from lockstep_gang.contract.run import Run, run_text
from lockstep_spec.files import open_regular, write_durably
from lockstep_spec.words import printable_line

FOLDER = "logs/output"
FILE_BYTES = 32 * 1024 * 1024
"""Size at which a file is put aside; there is one more of this size at most."""
LINES_WAITING_MAX = 20_000
TOGETHER_SECONDS = 0.3
"""Time over which lines are collected for one write: a shared volume must not see a write for each."""
RETRY_SECONDS = 10.0
BEGINS = "[lockstep] this agent begins: job"
"""Followed by the job's uid: lines before it are of an earlier process, or of an earlier job of this name."""


class Journal:
    """Takes lines at any speed, and never raises. `say` gets one line when the volume can't be written."""

    def __init__(self, run: Run, node: int, say: Callable[[str], None], file_bytes: int = FILE_BYTES) -> None:
        self._run = run
        self._path = Path(run.run_dir) / FOLDER / f"node-{node}.log"
        self._describes = node == 0
        self._say = say
        self._file_bytes = file_bytes
        self._attempt = 0
        self._waiting: deque[str] = deque()
        self._dropped = 0
        self._trouble = False
        self._closed = threading.Event()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self.write(f"{BEGINS} {run.job.uid}")
        self._thread.start()

    def begin_attempt(self, attempt: int) -> None:
        self._attempt = attempt

    def write(self, line: str) -> None:
        stamp = datetime.now(timezone.utc).isoformat(timespec="microseconds")[:-6]  # noqa: UP017 (Python 3.10 has no datetime.UTC)
        with self._news:
            if len(self._waiting) >= LINES_WAITING_MAX:
                self._dropped += 1
            else:
                self._waiting.append(f"{stamp}Z {self._attempt} {line}\n")
            self._news.notify()

    def close(self, seconds: float) -> None:
        """Write what is waiting, but not longer than this."""
        self._closed.set()
        with self._news:
            self._news.notify()
        self._thread.join(seconds)

    def _write_all(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closed.is_set())
            if self._describes:  # at once: whoever asks about the job reads it, and lines may wait for each other
                with contextlib.suppress(OSError):  # told with the lines, which the volume doesn't take either
                    self._describe()
            self._closed.wait(TOGETHER_SECONDS)
            with self._news:
                lines, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._dropped = 0
            if not lines and not dropped:
                return
            if not self._put(lines, dropped) and self._closed.wait(RETRY_SECONDS):
                return

    def _put(self, lines: list[str], dropped: int) -> bool:
        """Write lines. False: the volume did not take them, and they are gone; the node's own log still has them."""
        missing = [f"{lines[-1].split(' ', 1)[0] if lines else ''} 0 [lockstep] {dropped} lines left out\n"] if dropped else []
        try:
            if self._describes:
                self._describe()
            self._append("".join([*lines, *missing]).encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._dropped += len(lines) + dropped
            if not self._trouble:
                self._trouble = True
                self._say(f"cannot keep this log in {self._path} ({error.strerror}): is the volume full or read-only? The job goes on")
            return False
        return True

    def _append(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._opened() as file:  # anew: another may have taken its place meanwhile
            size = file.seek(0, os.SEEK_END)
            if size > 0 and size + len(data) > self._file_bytes:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                data = f"{data.split(b' ', 1)[0].decode()} 0 {BEGINS} {self._run.job.uid}\n".encode() + data
                with self._opened() as fresh:
                    fresh.write(data)
                return
            file.write(data)

    def _opened(self) -> BinaryIO:
        return os.fdopen(open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")

    def _describe(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path.with_name("run.json"), run_text(replace(self._run, environment={}, report=None)).encode())
        self._describes = False


TAIL_LINES = 100


class Console:
    """Takes lines at any speed. When the reader is that far behind, lines are left out and their number is said. Colors are for a terminal
    alone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.has_colors = os.isatty(descriptor) and not os.environ.get("NO_COLOR")
        self.journal: Journal | None = None
        """Journal that gets every line too, for those who look when this process's output is gone."""
        self._waiting: deque[str] = deque()
        self._dropped = 0
        self._closed = False
        self._news = threading.Condition()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def write(self, line: str, shown: str = "") -> None:
        self._tail.append(line)
        if self.journal is not None:
            self.journal.write(line)
        with self._news:
            if len(self._waiting) >= LINES_WAITING_MAX:
                self._dropped += 1
            else:
                self._waiting.append(shown if shown and self.has_colors else line)
            self._news.notify()

    def say(self, text: str) -> None:
        """Write a line of Lockstep's own, and no more than one: what it quotes of a script's exception may look like others."""
        self.write(f"[lockstep] {printable_line(text)}")

    def keep_in(self, journal: Journal) -> None:
        """Write the last lines, and all that follow, into the journal too."""
        for line in tuple(self._tail):
            journal.write(line)
        self.journal = journal

    def begin_attempt(self, attempt: int) -> None:
        """Mark the lines from here on as this attempt's."""
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
