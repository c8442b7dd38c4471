"""SIGTERM to a rank means save and stop, and nothing else."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopSignal:
    """Set by SIGTERM; read at step borders only, where all ranks agree on it."""

    requested: bool = False

    def install(self) -> None:
        """Only in the main thread; before torch is imported, so that a signal during start-up isn't lost."""
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
