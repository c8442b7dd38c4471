"""Progress of a fetch, in lines: only while bytes come, since a line is taken for a sign of life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lockstep_spec.words import decimal_size, duration

FIRST_SECONDS = 5.0
EVERY_SECONDS = 30.0


class FetchProgress:
    """Counter of bytes and files, for any thread."""

    def __init__(
        self, name: str, size_bytes: int, files: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._size = size_bytes
        self._files = files
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes = self._ended = self._present = 0
        self._last = (clock(), 0)
        self._next = clock() + FIRST_SECONDS

    def moved(self, count: int) -> None:
        """Count so many bytes more; fewer where a file is begun anew."""
        with self._lock:
            self._bytes += count

    def present(self, count: int) -> None:
        """Count bytes that were there before: they are no part of the speed."""
        with self._lock:
            self._present += count

    def done(self) -> None:
        """Count one more file."""
        with self._lock:
            self._ended += 1

    def tell(self) -> None:
        """Say a line if it is time, and if anything has moved since the last one."""
        now = self._clock()
        with self._lock:
            moved, present, ended = self._bytes, self._present, self._ended
        if now < self._next or moved <= self._last[1]:
            return
        then, before = self._last
        speed = (moved - before) / max(now - then, 1e-9)
        left = max(0, self._size - present - moved) / speed
        self._last, self._next = (now, moved), now + EVERY_SECONDS
        self._say(
            f"Fetching {self._name}: {decimal_size(present + moved)} of {decimal_size(self._size)}, {ended} of {self._files} files, "
            f"{speed / 1e6:,.0f} MB/s, about {duration(left)} left"
        )
