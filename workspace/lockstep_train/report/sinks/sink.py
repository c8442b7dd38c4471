"""Destination of metrics that can neither block nor kill the training, whatever its client library does."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep_spec.files import write_durably

QUEUE_POINTS = 2000
BATCH_POINTS = 200
POLL_SECONDS = 0.2
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits between the tries of a batch; after the last one it is dropped."""


@dataclass(frozen=True)
class Point:
    """Values of one moment: `{"train/loss": 2.2}`."""

    step: int
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]


class Writer(Protocol):
    """Client library behind two calls. Both may raise, hang or exit; they run in the sink's thread."""

    def write(self, points: list[Point]) -> None: ...
    def close(self, outcome: str) -> None:
        """`outcome`: Done, Stopped or Failed."""


Tell = Callable[..., None]
"""Function that reports an event: Reporter.event."""


class MetricsSink:
    """Destination with a queue and a thread. The thread starts with the first point, so that no import is paid for by the start of the
    run.
    """

    def __init__(self, name: str, connect: Callable[[], Writer], tell: Tell) -> None:
        self.name = name
        self.dropped = 0
        self._connect = connect
        self._tell = tell
        self._points: queue.Queue[Point] = queue.Queue(QUEUE_POINTS)
        self._closing = threading.Event()
        self._outcome = ""
        self._reported = False
        self._writer: Writer | None = None
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._started = False

    def put(self, point: Point) -> None:
        """Put a point without waiting: one that finds the queue full is dropped and counted."""
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self.dropped += 1
        if not self._started:
            self._started = True
            self._thread.start()

    def close(self, outcome: str) -> None:
        """Say that no point will follow. `drained` waits."""
        self._outcome = outcome
        self._closing.set()

    def drained(self, timeout_seconds: float) -> bool:
        """Return True if everything has arrived within that time; what hasn't is counted as dropped."""
        if not self._started:
            return True
        self._thread.join(max(0.0, timeout_seconds))
        self.dropped += self._points.qsize()
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not (self._closing.is_set() and self._points.empty()):
            batch = self._take()
            if batch and not self._deliver(batch):
                self.dropped += len(batch)
        if self._writer is not None:
            self._try(lambda writer: writer.close(self._outcome))

    def _take(self) -> list[Point]:
        """Take the points that are there; waits a moment for the first."""
        batch: list[Point] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._points.get(timeout=POLL_SECONDS))
            while len(batch) < BATCH_POINTS:
                batch.append(self._points.get_nowait())
        return batch

    def _deliver(self, batch: list[Point]) -> bool:
        """Try until it works or the run wants to end."""
        for seconds in RETRY_SECONDS:
            if self._try(lambda writer: writer.write(batch)):
                return True
            if self._closing.wait(seconds):
                return False
        return self._try(lambda writer: writer.write(batch))

    def _try(self, action: Callable[[Writer], None]) -> bool:
        try:
            if self._writer is None:
                self._writer = self._connect()
            action(self._writer)
        except (Exception, SystemExit) as error:  # whatever a client library raises is about its metrics alone
            self._failed(error)
            return False
        return True

    def _failed(self, error: BaseException) -> None:
        """Report a failure once a run: a server that is away for a night must not fill the log."""
        if not self._reported:
            self._reported = True
            reason = redact(f"{type(error).__name__}: {' '.join(str(error).split())}")[:300]
            self._tell(
                "sinkFailed",
                line=f"{self.name} received no metrics ({reason}); training goes on, and sending is retried",
                sink=self.name,
                reason=reason,
            )


_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6
"""A shorter value would black out common words."""


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` without users and passwords of URLs, and without values of environment variables that are named like secrets.

    No secret leaves through a line or a file of ours.
    """
    text = _USER_IN_URL.sub("***@", text)
    for name, value in (os.environ if environ is None else environ).items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


@dataclass(frozen=True)
class ServiceRun:
    """Id under which a run is known to a service: kept in the run's folder, so that a resumed run goes on there."""

    path: Path
    job_uid: str | None
    resumed_step: int

    def recall(self) -> str | None:
        """Id that an earlier attempt kept; None for a run that starts anew, be it in an old folder."""
        try:
            record = json.loads(self.path.read_bytes())
            same_run = self.resumed_step > 0 or (self.job_uid is not None and record["jobUid"] == self.job_uid)
            return str(record["id"]) if same_run else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, run_id: str) -> None:
        write_durably(self.path, json.dumps({"jobUid": self.job_uid, "id": run_id}).encode())
