"""One proved connection between two nodes: signed JSON lines over TCP. Nothing on it is secret, and none of it can be forged."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, SupportsIndex

from lockstep_gang.contract.lines import PROOF_SECONDS, ProvingReader, Streams, next_line, send_at_once, send_plain
from lockstep_spec.handshake import FORMAT, Handshake, Opener, ProofError, Sealer, new_nonce, read_object, require_proof

UNACKED = slice(24, 28)
WAITING_MAX = 1024
"""Connections that the kernel holds until they are taken: all agents of a big gang may come in the same second."""


class _Reader(ProvingReader):
    """Reader that knows when anything came: a message that is not read yet, or not whole yet, is a sign of life too."""

    last_heard = 0.0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.last_heard = time.monotonic()
        super().feed_data(data)


class OtherFormat(ProofError):
    """The other side speaks another format, which is `spoken`."""

    def __init__(self, spoken: object, own: str) -> None:
        self.spoken = repr(spoken)[:60]
        super().__init__(f"the coordinator speaks {self.spoken}, this agent {own}")


class Unproved(ProofError):
    """The other side has told that it has another key."""


async def listen(
    taken: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
    hosts: str | list[str] | None,
    port: int,
    *,
    serves: bool = True,
) -> asyncio.Server:
    """A server on this port, whose connections `taken` gets; without `serves` from `start_serving` on. Raises OSError."""

    def protocol() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(_Reader(), taken)

    return await asyncio.get_running_loop().create_server(protocol, hosts, port, backlog=WAITING_MAX, start_serving=serves)


async def _open(address: tuple[str, int]) -> Streams:
    loop = asyncio.get_running_loop()
    reader = _Reader()
    transport, protocol = await loop.create_connection(lambda: asyncio.StreamReaderProtocol(reader), *address)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class Channel:
    """Messages to and from the other side, which has proved the job's key."""

    def __init__(self, streams: Streams, sealer: Sealer, opener: Opener) -> None:
        self._reader, self._writer = streams
        if isinstance(self._reader, _Reader):
            self._reader.proved()
        self._sealer = sealer
        self._opener = opener
        self.is_given_up = False
        """True if it was silent for too long, so this side ended it."""

    def send(self, message: dict[str, Any]) -> None:
        """Send at once, without waiting. A closed connection takes nothing."""
        if not self._writer.is_closing():
            self._writer.write(self._sealer.seal(message))

    @property
    def connection(self) -> Any:
        """The socket."""
        return self._writer.get_extra_info("socket")

    @property
    def last_heard(self) -> float:
        """`time.monotonic` of the last sign of life from the other side."""
        return getattr(self._reader, "last_heard", 0.0)

    def abort(self) -> None:
        """Give the connection up, with what was not sent yet."""
        self._writer.transport.abort()

    def give_up(self) -> None:
        self.is_given_up = True
        self.abort()

    @property
    def arrives(self) -> bool:
        """True if the other side's machine has acknowledged all that was sent, as this one's kernel knows (`struct tcp_info`,
        tcpi_unacked).
        """
        try:
            info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, UNACKED.stop)
        except (AttributeError, OSError):
            return False  # it is closed
        return self.backlog_bytes == 0 and info[UNACKED] == bytes(4)

    @property
    def backlog_bytes(self) -> int:
        """Size of what the other side has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    async def receive(self) -> dict[str, Any]:
        """The next message. EOFError when the other side closed, ContractError when it is not its next message, OSError."""
        return self._opener.open(await next_line(self._reader))

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def accept(streams: Streams, key: bytes, job_uid: str, nodes: int, spoken: str = FORMAT) -> tuple[int, Channel]:
    """Accept a connection as the coordinator. Returns the node that proved the key, and its channel. Raises ContractError, EOFError,
    OSError. `spoken`: format of what the channel carries.
    """
    reader, writer = streams
    send_at_once(writer)
    challenge = new_nonce()
    send_plain(writer, {"format": spoken, "nonce": challenge})
    answer = read_object(await next_line(reader))
    node, nonce = answer.get("node"), answer.get("nonce")
    if type(node) is not int or not 0 <= node < nodes or not isinstance(nonce, str):
        raise ProofError(f"node is {repr(node)[:60]}, must be 0 to {nodes - 1}, with a nonce and a proof")
    handshake = Handshake(key, job_uid, node, challenge, nonce)
    require_proof(handshake.agent_proof(), answer.get("proof"))
    send_plain(writer, {"proof": handshake.coordinator_proof()})
    return node, Channel(streams, Sealer(handshake.to_agent()), Opener(handshake.to_coordinator()))


async def connect(address: tuple[str, int], key: bytes, job_uid: str, node: int, spoken: str = FORMAT) -> Channel:
    """Connect as an agent. Raises ContractError, EOFError, OSError, asyncio.TimeoutError."""
    streams = await asyncio.wait_for(_open(address), PROOF_SECONDS)
    try:
        return await asyncio.wait_for(_prove(streams, key, job_uid, node, spoken), PROOF_SECONDS)
    except BaseException:
        streams[1].close()
        raise


async def _prove(streams: Streams, key: bytes, job_uid: str, node: int, spoken: str) -> Channel:
    reader, writer = streams
    send_at_once(writer)
    challenge = read_object(await next_line(reader))
    if challenge.get("format") != spoken or not isinstance(challenge.get("nonce"), str):
        raise OtherFormat(challenge.get("format"), spoken)
    nonce = new_nonce()
    handshake = Handshake(key, job_uid, node, challenge["nonce"], nonce)
    send_plain(writer, {"node": node, "nonce": nonce, "proof": handshake.agent_proof()})
    answer = read_object(await next_line(reader))
    if "refused" in answer:
        raise Unproved("the other side has another key")
    require_proof(handshake.coordinator_proof(), answer.get("proof"))
    return Channel(streams, Sealer(handshake.to_coordinator()), Opener(handshake.to_agent()))
