"""Clock of a step's parts, and the time that this rank has waited inside collective operations, so that its own time is known: a step takes
all ranks equally long.

Every wait of a c10d operation ends in `Work.wait`. On CPUs the host waits there. On a GPU it only makes the stream wait, so the stream's
own times before and after are taken. An operation that isn't asynchronous runs on that stream itself: there the wait lies between the times
before and after it is issued, and `Work.wait` finds nothing left to wait for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

PARTS = ("data", "forward", "backward", "wait", "optimizer", "saveWait")
"""`wait`: until every rank has its gradients; `saveWait`: until the last save's copy is complete."""


def moment(on_gpu: bool) -> Any:
    """Return now: seconds of the host, or an event in the device's stream."""
    if not on_gpu:
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Clock:
    """Laps of one step. On a GPU the device's own times are taken, since the host only queues work and runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[str, Any]] = []
        self.start()

    def start(self) -> None:
        self._laps = [("", moment(self._on_gpu))]

    def lap(self, part: str) -> None:
        """End a lap: what happened since the last one was `part`."""
        self._laps.append((part, moment(self._on_gpu)))

    def seconds(self) -> Mapping[str, float]:
        """Seconds by part, 0 for those that did not happen. Waits for the device."""
        seconds = dict.fromkeys(PARTS, 0.0)
        if self._on_gpu:
            self._laps[-1][1].synchronize()
        for (_, before), (part, after) in zip(self._laps[:-1], self._laps[1:], strict=True):
            seconds[part] += before.elapsed_time(after) / 1000 if self._on_gpu else after - before
        return seconds


COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base",
    "broadcast", "gather", "gather_single", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip
"""Methods of torch's ProcessGroup, of several versions."""
_counting: Waits | None = None
"""Waits that are counted: one of a process."""


class Waits:
    """Waits of one run."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.begun = False
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Count from the next `begin` on; what counted before doesn't any more."""
        global _counting  # noqa: PLW0603 (as Work.wait itself, there is one a process)
        if _counting is None:
            _count_within(Work, "wait", lambda *_: True)
            for name in COLLECTIVES:
                if hasattr(ProcessGroup, name):
                    _count_within(ProcessGroup, name, _on_the_stream)
        _counting = self

    def begin(self) -> None:
        """Keep waits from here to `taken` only: an evaluation of thousands of batches must not pile up events."""
        self._seconds, self._events, self.begun = 0.0, [], True

    def add(self, before: Any) -> None:
        if self.on_gpu:
            self._events.append((before, moment(on_gpu=True)))
        else:
            self._seconds += time.perf_counter() - before

    def taken(self) -> Taken:
        """Waits since `begin`."""
        self.begun = False
        return Taken(self._seconds, self._events)


class Taken:
    """Waits of a while; on a GPU they can be read once the device has come so far."""

    def __init__(self, seconds: float, events: list[tuple[Any, Any]]) -> None:
        self._seconds = seconds
        self._events = events

    @property
    def seconds(self) -> float:
        on_gpu: float = sum(before.elapsed_time(after) for before, after in self._events if after.query())
        return self._seconds + on_gpu / 1000


def _on_the_stream(waits: Waits, arguments: Iterable[Any]) -> bool:
    """Return True for an operation that was issued to run on the current stream: torch has that in the operation's options."""
    return waits.on_gpu and any(getattr(value, "asyncOp", True) is False for value in arguments)


def _count_within(owner: Any, name: str, counts: Callable[[Waits, Iterable[Any]], bool]) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def counted(*arguments: Any, **options: Any) -> Any:
        waits = _counting
        if waits is None or not waits.begun or not counts(waits, (*arguments, *options.values())):
            return real(*arguments, **options)
        before = moment(waits.on_gpu)
        try:
            return real(*arguments, **options)
        finally:
            waits.add(before)

    setattr(owner, name, counted)
