"""How long this rank has waited inside collective operations, so that its own time is known: a step takes all ranks equally long.

Every wait of a c10d operation ends in `Work.wait`. On CPUs the host waits there. On a GPU it only makes the stream wait, so the stream's
own times before and after are taken.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch.distributed import Work

_counting: Waits | None = None
"""Whose waits are counted: one of a process."""


class Waits:
    """Of one run."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Count from now on; what counted before doesn't any more."""
        global _counting  # noqa: PLW0603 (as Work.wait itself, there is one a process)
        if _counting is None:
            _wrap(Work)
        _counting = self

    def now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, before: Any) -> None:
        if self._on_gpu:
            self._events.append((before, self.now()))
        else:
            self._seconds += time.perf_counter() - before

    def taken(self) -> Taken:
        """What was waited since the last time."""
        found = Taken(self._seconds, self._events)
        self._seconds, self._events = 0.0, []
        return found


class Taken:
    """Waits of a while; on a GPU they can be read once the device has come so far."""

    def __init__(self, seconds: float, events: list[tuple[Any, Any]]) -> None:
        self._seconds = seconds
        self._events = events

    @property
    def seconds(self) -> float:
        on_gpu: float = sum(before.elapsed_time(after) for before, after in self._events if after.query())
        return self._seconds + on_gpu / 1000


def _wrap(work: Any) -> None:
    real = work.wait

    @functools.wraps(real)
    def wait(*arguments: Any, **options: Any) -> Any:
        waits = _counting
        if waits is None:
            return real(*arguments, **options)
        before = waits.now()
        try:
            return real(*arguments, **options)
        finally:
            waits.add(before)

    work.wait = wait
