"""Since when a change of each job's status waits for what follows. In memory only: a new operator lets it wait anew."""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.plan.passing import SETTLE_SECONDS


class Settling:
    """By the job's uid."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def left(self, uid: str) -> float:
        """Seconds that the change may still wait; at most 0: it is to be written."""
        return self._since.setdefault(uid, self._clock()) + SETTLE_SECONDS - self._clock()

    def settled(self, uid: str) -> None:
        """There is nothing that waits."""
        self._since.pop(uid, None)

    def forget(self, uids: set[str]) -> None:
        """Keep these jobs only."""
        self._since = {uid: since for uid, since in self._since.items() if uid in uids}
