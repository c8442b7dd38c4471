"""Clock of a step's parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

PARTS = ("data", "forward", "backward", "wait", "optimizer", "saveWait")
"""`wait`: until every rank has its gradients; `saveWait`: until the last save's copy is complete."""


class Clock:
    """Laps of one step. On a GPU the device's own times are taken, since the host only queues work and runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[str, Any]] = []
        self.start()

    def start(self) -> None:
        self._laps = [("", self._now())]

    def lap(self, part: str) -> None:
        """End a lap: what happened since the last one was `part`."""
        self._laps.append((part, self._now()))

    def seconds(self) -> Mapping[str, float]:
        """Seconds by part, 0 for those that did not happen. Waits for the device."""
        seconds = dict.fromkeys(PARTS, 0.0)
        if self._device.type == "cuda":
            self._laps[-1][1].synchronize()
        for (_, before), (part, after) in zip(self._laps[:-1], self._laps[1:], strict=True):
            seconds[part] += before.elapsed_time(after) / 1000 if self._device.type == "cuda" else after - before
        return seconds

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
