"""Reports of this node's ranks on their way to the coordinator: progress is collected for a while, all else is sent at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lockstep_gang.contract.messages import (
    Activity,
    AgentMessage,
    Beat,
    Error,
    Pace,
    Progressed,
    RankExit,
    RankReport,
    RankState,
    Reported,
    Step,
    rank_report_to_json,
)
from lockstep_gang.contract.times import progress_seconds
from lockstep_spec.codec import to_json

NODE_0_SECONDS = 0.5
"""The newest steps and the like of node 0's ranks are sent at most this often: they are shown. Those of other nodes' ranks, of which
there may be thousands, as seldom as `progress_seconds` says."""
SOON_SECONDS = 0.2
"""Delay of what ranks are doing, for all ranks of a node together: all ranks of a gang begin and save in the same moment."""
MESSAGE_BYTES = 256 * 1024
"""Size of the reports that one message holds."""
HELLO_BYTES = 2 * 1024 * 1024
"""Size of a Hello's part about ranks; a message may be twice as long."""
WAITING_MAX = 1000
"""Reports that may wait; of a script that tells its pace more often than anybody needs, some are left out."""


class Outbox:
    """The reports of the running attempt that have not been sent."""

    def __init__(self, node: int, ranks: int, send: Callable[[AgentMessage], None]) -> None:
        """`ranks`: of the whole gang."""
        self._pause = NODE_0_SECONDS if node == 0 else progress_seconds(ranks)
        self._send = send
        self._attempt = 0
        self._waiting: dict[tuple[type, int, int], RankReport] = {}
        self._soon: asyncio.TimerHandle | None = None

    def begin_attempt(self, attempt: int) -> None:
        """Drop what the attempt before has not sent."""
        self._attempt = attempt
        self._waiting.clear()

    def put(self, report: RankReport, first: bool = False) -> None:
        """Progress waits, the newest of each kind and rank and every pace; what a rank is at, and the first it says, not for long. Anything
        else is sent at once, after what waits, and so is what rank 0 is at: it is shown."""
        if not isinstance(report, (Activity, Step, Beat, Pace)) or (isinstance(report, Activity) and report.rank == 0):
            self.flush()
            self._send(Reported(self._attempt, rank_report_to_json(report)))
            return
        each = report.step if isinstance(report, Pace) and len(self._waiting) < WAITING_MAX else 0
        self._waiting.pop((type(report), report.rank, each), None)  # the newest is sent last
        self._waiting[type(report), report.rank, each] = report
        if (first or isinstance(report, Activity)) and self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(SOON_SECONDS, self.flush)

    def flush(self) -> None:
        """Send what waits, in one message if it isn't too long for that."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        together: list[dict[str, Any]] = []
        size = 0
        for report in self._waiting.values():
            together.append(rank_report_to_json(report))
            size += json_bytes(together[-1])
            if size > MESSAGE_BYTES:
                self._send(Progressed(self._attempt, tuple(together)))
                together, size = [], 0
        if together:
            self._send(Progressed(self._attempt, tuple(together)))
        self._waiting.clear()

    async def run(self) -> None:
        """Flush now and then; never ends. The agents of a big gang, which began together, do so at different moments."""
        await asyncio.sleep(random.uniform(0, self._pause))  # noqa: S311 (no secret)
        while True:
            await asyncio.sleep(self._pause)
            self.flush()


def bounded(states: Sequence[RankState], limit_bytes: int = HELLO_BYTES) -> tuple[RankState, ...]:
    """Shorten a Hello's part about ranks to fit a message, which the coordinator would else refuse again and again. The newest of each
    rank's last lines stay.
    """
    if json_bytes(to_json(states)) <= limit_bytes:
        return tuple(states)
    each = limit_bytes // len(states)
    return tuple(replace(state, exit=_shortened(state.exit, each)) if state.exit is not None else state for state in states)


def _shortened(exit_: RankExit, limit_bytes: int) -> RankExit:
    """The exit within so many bytes. A character takes at most 12 bytes, as a pair of JSON's escapes."""
    if json_bytes(to_json(exit_)) <= limit_bytes:
        return exit_
    error = exit_.error
    if error is not None:
        exception, message = error.exception[: limit_bytes // 96], error.message[: limit_bytes // 48]
        exit_ = replace(exit_, error=Error(error.rank, exception, message))
    lines: list[str] = []
    left = limit_bytes // 2
    for line in reversed(exit_.last_lines):
        left -= json_bytes(line) + 2
        if left < 0:
            break
        lines.append(line)
    fresh_from = max(0, exit_.fresh_from - (len(exit_.last_lines) - len(lines)))
    return replace(exit_, last_lines=tuple(reversed(lines)), fresh_from=fresh_from)


def json_bytes(value: object) -> int:
    return len(json.dumps(value))
