"""The node's log on the job's volume: it outlives the pod, its restarts and the job. `lockstep logs` reads it.

One file a node, `logs/output/node-N.log` in the run's folder, each line `TIME ATTEMPT LINE`. When it is full it becomes `node-N.log.1`, so that
a rank that floods its output can't fill the volume. Beside it `run.json`, what this run was told, without variables.
Written by a thread of its own: a volume that hangs or is full holds up neither the ranks nor what `kubectl logs` shows.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from lockstep_gang.contract.files import open_regular, write_new
from lockstep_gang.contract.run import Run, run_text

FOLDER = "logs/output"
FILE_BYTES = 32 * 1024 * 1024
"""Of the file that grows; there is one more of this size at most."""
LINES_WAITING_MAX = 20_000
TOGETHER_SECONDS = 0.3
"""Lines of so long are written at once: a shared volume must not see a write for each."""
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
        """False: the volume did not take them, and they are gone; the node's own log still has them."""
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
        draft = self._path.with_name(".run.json")
        write_new(draft, run_text(replace(self._run, environment={}, report=None)).encode())
        draft.replace(self._path.with_name("run.json"))
        self._describes = False
