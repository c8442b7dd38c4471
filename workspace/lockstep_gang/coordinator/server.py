"""The coordinator's port: takes agents' connections, proves them, and passes on what they say."""

from __future__ import annotations

import asyncio
import contextlib

from lockstep_gang.contract.codec import ContractError
from lockstep_gang.contract.exits import SILENCE_SECONDS
from lockstep_gang.contract.messages import Hello, agent_message
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.channel import LINE_BYTES_MAX, PROOF_SECONDS, Channel, accept
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.ports import listening_addresses


class Server:
    """Listens for the agents of one job; nobody without the job's key is heard."""

    def __init__(self, run: Run, key: bytes, coordinator: Coordinator, output: Output) -> None:
        self._run = run
        self._key = key
        self._coordinator = coordinator
        self._output = output
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[str, int]:
        """Listen on the pod's own addresses, or on loopback when all nodes are this machine; the address for the agent beside it. Raises OSError."""
        hosts = listening_addresses(self._run.addresses[0])
        self._server = await asyncio.start_server(self._accepted, hosts, self._run.coordinator_port, limit=LINE_BYTES_MAX)
        address = self._server.sockets[0].getsockname()[0]
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address), self._run.coordinator_port  # noqa: S104 (compared, not bound)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._connection(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        try:
            streams = (reader, writer)
            node, channel = await asyncio.wait_for(accept(streams, self._key, self._run.job.uid, self._run.nodes), PROOF_SECONDS)
        except (ContractError, EOFError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (another class in Python 3.10)
            if isinstance(error, ContractError):  # anything else may be a probe of the port
                self._output.say(f"refused a connection from {peer[0] if peer else 'nowhere'}: {error}")
        else:
            await self._listen(node, channel)
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
                message = agent_message(await asyncio.wait_for(channel.receive(), SILENCE_SECONDS))
                self._coordinator.heard(node, message)
        except ContractError as error:
            self._output.say(f"closed the connection of node {node}: {error}")
        except (EOFError, OSError, asyncio.TimeoutError):  # noqa: UP041 (another class in Python 3.10)
            pass  # a closed or silent connection; the lifecycle judges it
        finally:
            self._coordinator.disconnected(node, channel)
