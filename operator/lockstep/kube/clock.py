"""The time that decisions are made by: this machine's, compared with the Date of the API server's replies.

A leader whose clock is a year ahead would fail every job with a deadline and delete every finished one with a TTL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

OFF_SECONDS = 30.0
"""Clocks that differ by more don't show the same time. A Date has whole seconds, and a reply takes a while."""
SLOW_SECONDS = 5.0
"""A reply that took longer says nothing about the time."""
log = logging.getLogger("lockstep.operator")


def boot_seconds() -> float:
    """Seconds that no change of the date touches, and that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ServerClock:
    """Goes on by the machine's uptime: a date that somebody sets changes nothing before a reply confirms it."""

    def __init__(self, local: Callable[[], float] = time.time, uptime: Callable[[], float] = boot_seconds) -> None:
        self._local = local
        self._uptime = uptime
        self._base = local() - uptime()
        self.off_seconds = 0.0
        """Seconds that this machine's clock is ahead of the API server's (negative: behind); 0 while they agree."""

    def now(self) -> float:
        """Seconds since 1970, by the API server where this machine's clock differs from it."""
        return self._base + self._uptime()

    def heard(self, date: str | None, sent_at: float) -> None:
        """`date`: of a reply that came now; `sent_at`: the uptime when it was asked for."""
        uptime = self._uptime()
        if not date or uptime - sent_at > SLOW_SECONDS:
            return
        try:
            server = parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        local = self._local()
        if abs(local - server) <= OFF_SECONDS:
            self._base = local - uptime
            self._is_off(0.0)
        else:
            if abs(self.now() - server) > OFF_SECONDS:
                self._base = server - uptime
            self._is_off(local - server)

    def _is_off(self, seconds: float) -> None:
        if bool(seconds) != bool(self.off_seconds):
            state = f"is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'}" if seconds else "agrees again with"
            log.warning("this machine's clock %s the API server's%s", state, ": no deadline and no TTL is acted on" if seconds else "")
        self.off_seconds = seconds
