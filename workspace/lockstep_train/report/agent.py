"""Datagrams to the agent of this node, which judges by them whether the ranks live."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

DATAGRAM_BYTES = 60_000
TRACEBACK_LINES = 30
PATIENCE_SECONDS = 2.0
PACE_SECONDS = 2.0
PROGRESS = frozenset({"activity", "step", "beat", "pace"})


class Agent:
    """The agent's datagram socket; silent when there is none or nobody listens. Any thread may send."""

    def __init__(self, path: str | None, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if path else None
        self._activity: str | None = None
        self._lock = threading.Lock()

    def send(self, event: str, **fields: Any) -> None:
        """Send an event. Progress is dropped at once when the agent's queue is full; what matters later waits for it a little."""
        if self._socket is None or self._path is None:
            return
        datagram = json.dumps({"rank": self._rank, "event": event, **fields}).encode()
        if len(datagram) > DATAGRAM_BYTES:
            return
        with self._lock, contextlib.suppress(OSError):
            self._socket.settimeout(0 if event in PROGRESS else PATIENCE_SECONDS)
            self._socket.sendto(datagram, self._path)

    def send_activity(self, activity: str) -> None:
        if activity != self._activity:
            self._activity = activity
            self.send("activity", activity=activity)

    def send_error(self, error: BaseException) -> None:
        lines = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
        self.send("error", exception=type(error).__name__, message=str(error)[:2000], traceback=[line[:500] for line in lines])


class PaceTeller:
    """Pace of a rank: its own time a step, sent every few seconds, since who holds the others up can't be seen from anything else."""

    def __init__(self, agent: Agent, clock: Callable[[], float] = time.monotonic) -> None:
        self._agent = agent
        self._clock = clock
        self._seconds = 0.0
        self._steps = 0
        self._sent_at = clock()

    def step(self, step: int, own_seconds: float) -> None:
        """`own_seconds`: of data, forward and backward pass, without what was waited for other ranks; where ranks have unequal shares,
        divided by what this one's should take (shares.py), so that a card isn't slow for its work or fast for the lack of it.
        """
        self._seconds += own_seconds
        self._steps += 1
        if self._clock() - self._sent_at < PACE_SECONDS:
            return
        mean = round(1e6 * self._seconds / self._steps)
        self._agent.send("pace", step=step, steps=self._steps, microseconds=mean)
        self._seconds, self._steps, self._sent_at = 0.0, 0, self._clock()
