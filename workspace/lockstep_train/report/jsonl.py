"""JSONL files of a run that stay valid through kills and resumes: one record a line, each with `schema`, `time`, `attempt` and `step`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep_spec.files import durable_file

SCHEMA = 1
_TAIL_BYTES = 1 << 20
_UNWRITTEN_BYTES = 64 << 20
"""Most bytes kept of records that the disk has no room for."""
Record = dict[str, Any]


class JsonLog:
    """Log of records in a file, a line each, for any thread. Opening it drops a torn last line and what a resume undid."""

    def __init__(self, path: Path, resumed_step: int, attempt: int | None, history: bool = False) -> None:
        """Open the log. A log of measurements forgets its records of later steps than `resumed_step`: those steps are measured again. A
        `history` of events keeps them with `undone: true`, for they did happen. Raises OSError when the file can't be made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _ends_before(path, resumed_step):
            _rewrite(path, resumed_step, history)
        self._attempt = attempt
        self._last_step = -1 if history else _last_step(path)
        self._history = history
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. A measurement of a step that is there already is left out."""
        stamped = {"schema": SCHEMA, "time": round(time.time(), 3), "attempt": self._attempt, **record}
        line = json.dumps(finite(stamped), allow_nan=False, default=str) + "\n"
        with self._lock:
            if record["step"] > self._last_step:
                self._last_step = self._last_step if self._history else record["step"]
                if len(self._unwritten) + len(line) <= _UNWRITTEN_BYTES:
                    self._unwritten += line.encode()
                self._write_down()

    def _write_down(self) -> None:
        """Write all there is room for. What a full disk leaves, in the middle of a line too, is kept, and follows once there is room."""
        with contextlib.suppress(OSError, ValueError):  # neither a disk nor a closed file may end the run
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._write_down()
            self._file.close()


def finite(value: Any) -> Any:
    """Return `value` with null for every NaN and infinity: JSON has no name for them, and jq stops at one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _ends_before(path: Path, step: int) -> bool:
    """Return True if the file is whole and needs no rewriting: steps never fall within it, so its last line tells."""
    tail = _tail(path)
    return not tail or (tail.endswith(b"\n") and -1 < _last_step(path) <= step)


def _last_step(path: Path) -> int:
    """Step of the last line; -1 when there is none or it is torn."""
    last = parse(_tail(path)[:-1].rpartition(b"\n")[2])
    return -1 if last is None else int(last["step"])


def _tail(path: Path) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read()


def _rewrite(path: Path, step: int, history: bool) -> None:
    with path.open("rb") as old, durable_file(path) as new:
        for record in filter(None, map(parse, old)):
            undone = record["step"] > step
            if history or not undone:
                new.write(json.dumps({**record, "undone": True} if undone else record).encode() + b"\n")


def parse(line: bytes) -> Record | None:
    """Parse a line's record; None for a torn one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
