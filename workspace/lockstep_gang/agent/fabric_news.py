"""What this node's ranks say of their fabric: what is new in NCCL's logs; of gloo, which interface it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lockstep_gang.agent.gloo import GlooInterface
from lockstep_gang.agent.ranks import Ranks
from lockstep_gang.contract.messages import FabricSeen
from lockstep_gang.contract.run import Run

READ_SECONDS = 1.0
"""NCCL's logs are read so often."""


class FabricNews:
    """Of the newest attempt's ranks, while they run."""

    def __init__(self, run: Run, send: Callable[[FabricSeen], None]) -> None:
        self._gloo = GlooInterface(run)
        self._send = send

    def forget_told(self, ranks: Ranks | None) -> None:
        """Whoever listens is new: everything is to be told again."""
        self._gloo.forget_told()
        if ranks is not None:
            ranks.nccl.forget_told()

    def tell(self, ranks: Ranks | None) -> None:
        if ranks is None or not ranks.leaders:
            return
        seen = (*ranks.nccl.news(), *self._gloo.news(ranks.attempt, ranks.group_rank))
        if seen:
            self._send(FabricSeen(ranks.attempt, seen))

    async def watch(self, newest: Callable[[], Ranks | None]) -> None:
        """Until cancelled."""
        while True:
            self.tell(newest())
            await asyncio.sleep(READ_SECONDS)
