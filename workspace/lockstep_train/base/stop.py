"""SIGTERM to a rank means save and stop, and nothing else. A second one means the same. SIGUSR2: write down where it is, and end."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType


class StopSignal:
    """Set by SIGTERM; the main thread reads it at borders, where all ranks agree on it."""

    def __init__(self) -> None:
        self.requested = False
        self.stacks_requested = False
        """Set by SIGUSR2: the gang hangs and is about to be stopped."""
        self._readable: int | None = None

    def install(self) -> None:
        """Install the handlers, in the main thread, before torch is imported, so that a signal during start-up isn't lost."""
        self._readable, writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGUSR2, self._handle_usr2)

    def wait(self, seconds: float) -> None:
        """Wait, in another thread, for `seconds`, or until the signal comes. While the main thread waits within a
        collective no Python runs there, not even the handler; the C handler's byte in the pipe is seen all the same."""
        if self._readable is None:
            select.select([], [], [], seconds)
            return
        ready, _, _ = select.select([self._readable], [], [], seconds)
        signals = os.read(self._readable, 4096) if ready else b""
        self.requested = self.requested or signal.SIGTERM in signals
        self.stacks_requested = self.stacks_requested or signal.SIGUSR2 in signals

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _handle_usr2(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the byte in the pipe is what counts."""
