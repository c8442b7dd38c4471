"""SIGTERM to a rank means save and stop, and nothing else. A second one means the same."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType


class StopSignal:
    """Set by SIGTERM; the main thread reads it at borders, where all ranks agree on it."""

    def __init__(self) -> None:
        self.requested = False
        self._readable: int | None = None

    def install(self) -> None:
        """Only in the main thread; before torch is imported, so that a signal during start-up isn't lost."""
        self._readable, writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)

    def wait(self, seconds: float) -> None:
        """In another thread: returns after `seconds`, or at once when the signal comes. While the main thread waits within a
        collective no Python runs there, not even the handler; the C handler's byte in the pipe is seen all the same."""
        if self._readable is None:
            select.select([], [], [], seconds)
            return
        ready, _, _ = select.select([self._readable], [], [], seconds)
        if ready and signal.SIGTERM in os.read(self._readable, 4096):
            self.requested = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
