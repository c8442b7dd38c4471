"""The coordinator's port: takes agents' connections, proves them, and passes on what they say."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time

from lockstep_gang.contract.channel import Channel, accept, listen
from lockstep_gang.contract.lines import PROOF_SECONDS, PassedOver, Refusals
from lockstep_gang.contract.messages import AgentMessage, Hello, NewerKind, agent_message, passed_over
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import SILENCE_SECONDS, UNHEARD_SECONDS
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.network import listening_addresses
from lockstep_spec.codec import ContractError

LOOK_SECONDS = 1.0
PAUSED_SECONDS = 2.0
MANY_RANKS, COLLECTED = 512, (50_000, 20, 50)
"""Size of a gang from which on garbage is looked for less often. Its state is very many small objects that stay: looking as often as Python
does took a third of the time.
"""
STRANGERS_MAX = 128
"""Connections without a proof, beside one of every node. At more of them the oldest is closed: an agent's proof takes no time."""
FILES = 512
"""Open files of the coordinator beside its connections."""


class Server:
    """Listens for the agents of one job; nobody without the job's key is heard."""

    def __init__(self, run: Run, key: bytes, coordinator: Coordinator, output: Output) -> None:
        self._run = run
        self._key = key
        self._coordinator = coordinator
        self._output = output
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._unproved: dict[asyncio.StreamWriter, None] = {}
        """Connections without a proof, oldest first."""
        self._proved: dict[Channel, int] = {}
        """Proved connections, with the node of each."""
        self._unheard: set[Channel] = set()
        self._refusals = Refusals(output.say)
        self._passed_over = PassedOver(output.say)
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Listen on the pod's own addresses, or on loopback when all nodes are this machine. Returns the address for the agent beside it.
        Raises OSError.
        """
        hosts = listening_addresses(self._run.addresses[0])
        _allow_files(FILES + self._run.nodes)
        if self._run.world_size > MANY_RANKS:
            gc.set_threshold(*COLLECTED)
        self._server = await listen(self._accepted, hosts, self._run.coordinator_port)
        self._watching = asyncio.ensure_future(self._give_up_the_silent())
        address = self._server.sockets[0].getsockname()[0]
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address), self._run.coordinator_port  # noqa: S104 (compared, not bound)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        if self._watching is not None:
            self._watching.cancel()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._connection(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        self._unproved[writer] = None
        connection.add_done_callback(lambda _: self._unproved.pop(writer, None))
        if len(self._unproved) > self._run.nodes + STRANGERS_MAX:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.transport.abort()

    async def _give_up_the_silent(self) -> None:
        """Give up connections that are silent. What came while this process did not run, or had too much to do, is still to be read: then
        all have their whole time again.
        """
        since = time.monotonic()
        while True:
            due = time.monotonic() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            since = now if now - due > PAUSED_SECONDS else since
            for channel, node in list(self._proved.items()):
                self._look_at(node, channel, now - max(since, channel.last_heard))

    def _look_at(self, node: int, channel: Channel, silent_seconds: float) -> None:
        is_unheard = silent_seconds > UNHEARD_SECONDS
        if is_unheard and channel not in self._unheard:
            self._unheard.add(channel)
            self._coordinator.unheard(node, channel, silent_seconds)
        elif not is_unheard and channel in self._unheard:
            self._unheard.discard(channel)
            self._coordinator.heard_again(node, channel)
        if silent_seconds > SILENCE_SECONDS:
            channel.give_up()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        try:
            streams = (reader, writer)
            node, channel = await asyncio.wait_for(accept(streams, self._key, self._run.job.uid, self._run.nodes), PROOF_SECONDS)
        except (ContractError, EOFError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (another class in Python 3.10)
            if isinstance(error, ContractError):  # anything else may be a probe of the port
                self._refusals.add(f"refused a connection from {peer[0] if peer else 'nowhere'}: {error}")
        else:
            self._unproved.pop(writer, None)
            self._proved[channel] = node
            await self._listen(node, channel)
            del self._proved[channel]
            self._unheard.discard(channel)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _listen(self, node: int, channel: Channel) -> None:
        try:
            hello = agent_message(await asyncio.wait_for(channel.receive(), PROOF_SECONDS))
            if not isinstance(hello, Hello) or hello.node != node:
                raise ContractError(f"a connection of node {node} must open with its Hello")
            if not self._coordinator.connected(node, channel, hello):
                await asyncio.sleep(SILENCE_SECONDS)  # hearing nothing, it stops its ranks
                return
            while True:
                message = self._read(await channel.receive())
                if message is not None:
                    self._coordinator.heard(node, message)
        except ContractError as error:
            self._output.say(f"closed the connection of node {node}: {error}")
        except (EOFError, OSError, asyncio.TimeoutError):  # noqa: UP041 (another class in Python 3.10)
            pass  # a closed or silent connection; the lifecycle judges it
        finally:
            self._coordinator.disconnected(node, channel)

    def _read(self, value: object) -> AgentMessage | None:
        try:
            message = agent_message(value)
        except NewerKind as error:
            self._passed_over.add(error)
            return None
        for kind in passed_over(message):
            self._passed_over.add(kind)
        return message


def _allow_files(count: int) -> None:
    """Raise the limit of open files, often 1,024: a big gang's coordinator has more connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard))
