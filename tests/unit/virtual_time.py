"""A clock that no test waits for: code that sleeps on it, or awaits a timer of its event loop, finds the time gone by at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import ModuleType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def clock_of(patch: pytest.MonkeyPatch, *modules: ModuleType, now: float = 1000.0) -> VirtualClock:
    """Give these modules one clock in place of `time`."""
    clock = VirtualClock(now)
    for module in modules:
        patch.setattr(module, "time", clock)
    return clock


async def forever(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


class VirtualClock:
    """A stand-in for the module `time`, too."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    time = perf_counter = monotonic

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in an event loop whose timers are due once nothing else is left to do."""
        with asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
            return runner.run(work)

    def seconds_of(self, work: Coroutine[Any, Any, Any]) -> float:
        """Time after which it ends, with whatever exception."""
        begun = self.now
        self.run(_settled(work))
        return self.now - begun


async def _settled(work: Coroutine[Any, Any, Any]) -> None:
    await asyncio.gather(work, return_exceptions=True)


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(timeout and 0)
        if not events and timeout:
            self._clock.now += timeout
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Selector(clock))
        self._virtual = clock

    def time(self) -> float:
        return self._virtual.now
