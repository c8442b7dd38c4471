"""This node's part of a dev environment: the socket that people ask at, what ranks print for them, and whether anybody is at work here."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from lockstep_gang.agent.link.link import Link
from lockstep_gang.agent.ranks.environment import Place, rank_environment
from lockstep_gang.agent.ranks.ranks import Node
from lockstep_gang.agent.ranks.script import look
from lockstep_gang.agent.session.activity import Activity
from lockstep_gang.agent.session.hostfile import write_hostfile
from lockstep_gang.agent.session.printed import FLUSH_SECONDS, PrintedLines
from lockstep_gang.agent.session.requests import Requests
from lockstep_gang.contract.interactive import Ended, Find, InUse, Show
from lockstep_gang.contract.messages import Order, Start

LOOK_SECONDS = 15.0
"""How often it is looked whether anybody works here; more often where the idle time is short."""


class DevNode:
    """Nothing of it does anything on a node of a Batch job."""

    def __init__(self, node: Node, link: Link, say: Callable[[str], None]) -> None:
        self._node, self._link, self._say = node, link, say
        self._is_dev = node.run.interactive is not None
        self.printed = PrintedLines(link, node.index)
        path = Path(os.environ.get("LOCKSTEP_SOCKET") or node.folder / "agent.sock")
        self._requests = Requests(path, f"node {node.index}", link.send, self._environment)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> list[Coroutine[Any, Any, None]]:
        """What is to run beside the agent from now on. Raises OSError when the socket can't be made."""
        if not self._is_dev:
            return []
        await self._requests.start()
        write_hostfile(self._node.run, self._node.index, self._say)
        return [self._flush_often(), *([self._watch()] if os.getpid() == 1 else [])]  # elsewhere not all processes are this job's

    def close(self) -> None:
        self._requests.close()
        for task in self._tasks:
            task.cancel()

    def take(self, order: Order) -> bool:
        """Whether the order was one for a dev environment."""
        if isinstance(order, (Show, Ended)):
            self._requests.take(order)
        elif isinstance(order, Find):
            task = asyncio.ensure_future(self._look(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return isinstance(order, (Show, Ended, Find))

    def connected(self) -> None:
        """This node's Hello was sent."""
        self._requests.connected()

    def writer(self, start: Start, write: Callable[[str], None]) -> Callable[[str], None]:
        """Where the ranks of this attempt print."""
        self.printed.begin(start.attempt)
        return self.printed.beside(write) if start.run is not None else write

    async def _look(self, find: Find) -> None:
        self._link.send(await asyncio.to_thread(look, find, self._node.index))

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            self.printed.flush()

    async def _watch(self) -> None:
        assert self._node.run.interactive is not None  # noqa: S101 (of a dev environment only)
        activity = Activity()
        idle = self._node.run.interactive.idle_seconds or LOOK_SECONDS * 4
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, idle / 4))
            if activity.seen(time.time()):
                self._link.send(InUse())

    def _environment(self) -> dict[str, str]:
        """Of the first rank of this node, as far as it isn't in the container's already."""
        run, node = self._node.run, self._node
        start = Start(0, 0, run.addresses[0], run.master_port)
        place = Place(node.index, run.position_of(node.index), 0, node.run_path, str(node.report_socket), "")
        found = rank_environment(run, start, place, {})
        left_out = ("TORCHELASTIC_ERROR_FILE", "LOCKSTEP_ATTEMPT", "LOCKSTEP_REPORT_SOCKET")
        return {name: value for name, value in found.items() if name not in left_out}
