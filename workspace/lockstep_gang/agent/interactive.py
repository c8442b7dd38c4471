"""This node's part of a dev environment: the socket that people ask at, what ranks print for them, and whether anybody is at work here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from lockstep_gang.agent.link import Link
from lockstep_gang.agent.ranks.environment import RankPlace, inherited, rank_environment
from lockstep_gang.agent.ranks.ranks import LocalNode
from lockstep_gang.agent.ranks.script import look
from lockstep_gang.agent.session.activity import ShellActivity
from lockstep_gang.agent.session.requests import RequestSocket
from lockstep_gang.contract.interactive import Ended, Find, InUse, Printed, Show
from lockstep_gang.contract.messages import Order, Start
from lockstep_gang.contract.run import Run
from lockstep_spec.choices import StorageMode
from lockstep_spec.files import read_regular, write_durably

BUNDLE_CHARACTERS = 128 * 1024
WAITING_CHARACTERS = 2 * 1024 * 1024
FLUSH_SECONDS = 0.1


class PrintedLines:
    """Lines that ranks print, for whoever asked for their run: in order, in small bundles, and never so many that anybody waits.

    What the connection doesn't take is left out and counted; this node's own log has it.
    """

    def __init__(self, link: Link, node: int) -> None:
        self._link, self._node = link, node
        self._attempt = 0
        self._lines: list[str] = []
        self._characters = 0
        self._left_out = 0

    def begin(self, attempt: int) -> None:
        self._attempt, self._lines, self._characters, self._left_out = attempt, [], 0, 0

    def beside(self, write: Callable[[str], None]) -> Callable[..., None]:
        """Return a function that passes lines to `write` and keeps them for the next `flush`."""

        def both(line: str, *_: str) -> None:
            write(line)
            self.add(line)

        return both

    def add(self, line: str) -> None:
        if self._characters > WAITING_CHARACTERS:
            self._left_out += 1
            return
        self._lines.append(line)
        self._characters += len(line) + 1
        if self._characters > BUNDLE_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        if not self._lines or not self._link.has_room:
            return
        if self._left_out:
            self._lines.append(f"[lockstep] {self._left_out} lines of node {self._node} left out: they came too fast; its own log has them")
            self._left_out = 0
        while self._lines:
            self._link.send(Printed(self._attempt, self._bundle()))

    def _bundle(self) -> tuple[str, ...]:
        """The first lines, as many as one message takes, and one at least."""
        size, count = 0, 0
        while count < len(self._lines) and (size == 0 or size + len(self._lines[count]) < BUNDLE_CHARACTERS):
            size += len(self._lines[count]) + 1
            count += 1
        bundle, self._lines = tuple(self._lines[:count]), self._lines[count:]
        self._characters -= size
        return bundle


HOSTFILE = "hostfile"


def write_hostfile(run: Run, node: int, say: Callable[[str], None]) -> None:
    """Write the hostfile for people's own tools, one line a node, as DeepSpeed and MPI read it. Nothing of Lockstep needs it.

    Node 0 writes it on a volume that all share; otherwise every node does.
    """
    if node != 0 and run.storage is not StorageMode.PER_POD:
        return
    path = Path(run.working_directory) / HOSTFILE
    text = "".join(f"{address} slots={len(run.ranks_of(node))}\n" for node, address in enumerate(run.addresses))
    try:
        with contextlib.suppress(OSError):  # it isn't there, or is something else
            if read_regular(path, len(text.encode())) == text.encode():
                return
        write_durably(path, text.encode())
    except OSError as error:
        say(f"cannot write {path}: {error}; runs don't need it")


LOOK_SECONDS = 15.0
"""Time between two looks whether anybody works here; less if the idle time is short."""


class DevNode:
    """This node's part of a dev environment; it does nothing on a node of a Batch job."""

    def __init__(self, node: LocalNode, link: Link, say: Callable[[str], None]) -> None:
        self._node, self._link, self._say = node, link, say
        self._is_dev = node.run.interactive is not None
        self.printed = PrintedLines(link, node.index)
        path = Path(os.environ.get("LOCKSTEP_SOCKET") or node.folder / "agent.sock")
        self._requests = RequestSocket(path, f"node {node.index}", link.send, self._environment)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> list[Coroutine[Any, Any, None]]:
        """Open the socket, and return what runs beside the agent from now on. Raises OSError when the socket can't be made."""
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
        """Return True if the order was one for a dev environment."""
        if isinstance(order, (Show, Ended)):
            self._requests.take(order)
        elif isinstance(order, Find):
            task = asyncio.ensure_future(self._look(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return isinstance(order, (Show, Ended, Find))

    def connected(self) -> None:
        """Send the requests that run again: this node's Hello was sent."""
        self._requests.connected()

    def writer(self, start: Start, write: Callable[..., None]) -> Callable[..., None]:
        """Return the function to which the ranks of this attempt print."""
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
        activity = ShellActivity()
        idle = self._node.run.interactive.idle_seconds or LOOK_SECONDS * 4
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, idle / 4))
            if activity.was_used(time.time()):
                self._link.send(InUse())

    def _environment(self) -> dict[str, str]:
        """Variables of the first rank of this node that the container doesn't have."""
        run, node = self._node.run, self._node
        start = Start(0, 0, run.addresses[0], run.master_port)
        place = RankPlace(
            node.index, run.layout.position_of(node.index), run.ranks_of(node.index).start, 0, node.run_path, str(node.report_socket), ""
        )
        container = inherited()
        variables = rank_environment(run, start, place, container)
        left_out = ("TORCHELASTIC_ERROR_FILE", "LOCKSTEP_ATTEMPT", "LOCKSTEP_REPORT_SOCKET")
        return {name: value for name, value in variables.items() if container.get(name) != value and name not in left_out}
