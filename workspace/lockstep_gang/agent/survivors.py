"""Ranks that SIGKILL does not end: their system call doesn't return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lockstep_gang.agent.ranks import Ranks
from lockstep_gang.contract.messages import Dumped

SURVIVED_SECONDS = 5.0
"""A rank that has not ended so long after SIGKILL is told of."""


class Survivors:
    """Tells of them again and again: the coordinator may be away, and their state may change."""

    def __init__(self, send: Callable[[Dumped], None]) -> None:
        self._send = send
        self._attempt = 0

    def killed(self, ranks: Ranks) -> None:
        """Its ranks were sent SIGKILL, for the first time or again."""
        if ranks.attempt != self._attempt and ranks.left():
            self._attempt = ranks.attempt
            asyncio.get_running_loop().call_later(SURVIVED_SECONDS, self._tell, ranks)

    def _tell(self, ranks: Ranks) -> None:
        dumps = ranks.survivors()
        for dump in dumps:
            self._send(dump)
        if dumps:
            asyncio.get_running_loop().call_later(SURVIVED_SECONDS, self._tell, ranks)
