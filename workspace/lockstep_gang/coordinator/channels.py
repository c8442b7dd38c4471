"""The connections of a job's agents: the newest of each node, and who may not come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from lockstep_gang.contract.channel import Channel
from lockstep_gang.contract.interactive import Show
from lockstep_gang.contract.messages import Order, Ping, Start, message_to_json
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import PING_SECONDS
from lockstep_gang.coordinator.network import free_port
from lockstep_gang.lifecycle.gang import Request

PING_TURNS = 20


class Channels:
    """Connections by node. The gang learns of a connection a little later while a record is written: until then it is sent nothing but
    pings.
    """

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        self.of_node: dict[int, Channel] = {}
        self._known: dict[int, Channel] = {}
        self._instances: dict[int, str] = {}
        self._replaced: set[str] = set()
        """Agents, by instance, in whose place another one has come: their pod was taken for lost, and may yet run."""
        self._ports: dict[int, int] = {}

    def take(self, node: int, channel: Channel, instance: str) -> bool:
        """Put a connection in the place of an older one of the same node. False: its agent was replaced and doesn't know it."""
        if instance in self._replaced:
            self._say(f"node {node} was replaced, and its old agent is back: it is ignored until it ends")
            return False
        before = self._instances.get(node, instance)
        if before != instance:
            self._replaced.add(before)
        self._instances[node] = instance
        older = self.of_node.get(node)
        if older is not None:
            older.close()
        self.of_node[node] = channel
        return True

    def know(self, node: int, channel: Channel) -> None:
        """Note that the gang has heard this connection's Hello."""
        self._known[node] = channel

    def drop(self, node: int, channel: Channel) -> bool:
        """Forget a closed connection. False: another one has its place already."""
        if self.of_node.get(node) is not channel:
            return False
        del self.of_node[node]
        return True

    def send(self, node: int, order: Order) -> None:
        """Send to the connection that the gang means. If that is gone, its end is heard next, and the order decided anew."""
        channel = self.of_node.get(node)
        if channel is None or channel is not self._known.get(node):
            return
        if isinstance(order, Start):
            port = self._ports.setdefault(order.attempt, free_port(self._run.addresses[0], order.master_port))
            order = replace(order, master_port=port)
        channel.send(message_to_json(order))

    async def ping(self) -> None:
        """Ping every connection within PING_SECONDS, until cancelled.

        Each has its turn, so that a thousand are no burst. Turns go by the clock: one that comes late, since there is much to do, makes no
        other late.
        """
        seconds = PING_SECONDS / PING_TURNS
        last = int(time.monotonic() / seconds)
        while True:
            await asyncio.sleep(seconds)
            now = int(time.monotonic() / seconds)
            due = {turn % PING_TURNS for turn in range(max(last, now - PING_TURNS) + 1, now + 1)}
            last = now
            for channel in [channel for node, channel in self.of_node.items() if node % PING_TURNS in due]:
                channel.send(message_to_json(Ping()))


BACKLOG_BYTES = 8 * 1024 * 1024


class RunOutput:
    """Output of the running request, sent to the node where somebody asked for it: what all ranks print, and Lockstep's own lines. Nobody
    waits for a reader.
    """

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self._channels = channels
        self._left_out = 0

    def show(self, request: Request | None, lines: tuple[str, ...]) -> None:
        """Send the lines, unless nobody asked for the run or nobody waits for its end."""
        if request is None or (request.asked.detached and request.started):
            self._left_out = 0
            return
        channel = self._channels.get(request.node)
        if channel is None or channel.backlog_bytes > BACKLOG_BYTES:
            self._left_out += len(lines)
            return
        if self._left_out:
            lines = (f"[lockstep] {self._left_out} lines left out: they came too fast to be shown here; node 0's log has them", *lines)
            self._left_out = 0
        channel.send(message_to_json(Show(request.asked.id, lines)))
