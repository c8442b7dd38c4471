"""How long the coordinator has not been heard, in time in which this process itself ran."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

LOOK_SECONDS = 1.0
PAUSED_SECONDS = 2.0
"""A look that comes so late means that this process itself did not run: its pod was frozen, or its machine moved or starved."""


class Heard(Protocol):
    """Whoever listens to the coordinator."""

    @property
    def last_heard(self) -> float:
        """When it last heard something, `time.monotonic`."""


async def watch(link: Heard, silence_seconds: float, unheard: Callable[[], None]) -> None:
    """Until cancelled: call `unheard` every second from `silence_seconds` of silence on. After a pause of this process the silence begins anew."""
    since = time.monotonic()
    while True:
        since = max(since, link.last_heard)
        left = since + silence_seconds - time.monotonic()
        if left <= 0:
            unheard()
        due = time.monotonic() + (min(left, LOOK_SECONDS) if left > 0 else LOOK_SECONDS)
        await asyncio.sleep(due - time.monotonic())
        if time.monotonic() - due > PAUSED_SECONDS:  # what was said meanwhile is still to be read
            since = time.monotonic()
