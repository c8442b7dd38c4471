"""What this node's ranks report, on its way to the coordinator: progress put together now and then, all else at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lockstep_gang.contract.messages import AgentMessage, Beat, Pace, Progressed, RankReport, Reported, Step, rank_report_to_json

NODE_0_SECONDS = 0.5
"""Steps and the like of node 0's ranks are told at most this often, the newest ones: they are shown."""
OTHER_NODES_SECONDS = (2.0, 5.0)
"""Those of other nodes' ranks, of which there may be a thousand: the least, and the most for a gang of many nodes."""
WAITING_MAX = 1000
"""Of a script that tells its pace more often than anybody needs, some are left out."""


class Outbox:
    """The reports of the running attempt that have not been sent."""

    def __init__(self, node: int, nodes: int, send: Callable[[AgentMessage], None]) -> None:
        least, most = OTHER_NODES_SECONDS
        self._pause = NODE_0_SECONDS if node == 0 else min(max(least, nodes / 16), most)
        self._send = send
        self._attempt = 0
        self._waiting: dict[tuple[type, int, int], RankReport] = {}

    def begin_attempt(self, attempt: int) -> None:
        """What the attempt before has not told is of no interest any more."""
        self._attempt = attempt
        self._waiting.clear()

    def put(self, report: RankReport, at_once: bool = False) -> None:
        """Progress waits, the newest of each kind and rank and every pace; anything else is sent, after what waits."""
        if isinstance(report, (Step, Beat, Pace)) and not at_once:
            each = report.step if isinstance(report, Pace) and len(self._waiting) < WAITING_MAX else 0
            self._waiting[type(report), report.rank, each] = report
            return
        self.flush()
        self._send(Reported(self._attempt, rank_report_to_json(report)))

    def flush(self) -> None:
        """Send what waits, in one message."""
        if self._waiting:
            self._send(Progressed(self._attempt, tuple(rank_report_to_json(report) for report in self._waiting.values())))
            self._waiting.clear()

    async def run(self) -> None:
        """Flush now and then; never ends."""
        while True:
            await asyncio.sleep(self._pause)
            self.flush()
