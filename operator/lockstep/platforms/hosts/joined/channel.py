"""Connection between a launch and a joiner: both prove the token, then every line is signed and counted. Nothing on it is secret, and none
of it can be forged.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.platforms.hosts.joined.token import LaunchToken
from lockstep_gang.contract.lines import PROOF_SECONDS, ProvingReader, Streams, next_line, send_at_once, send_plain
from lockstep_spec.handshake import Handshake, Opener, ProofError, Sealer, new_nonce, read_object, require_proof

FORMAT = "lockstep-launch/1"
PROOF_BYTES_MAX = 4 * 1024
"""Length of a line before the proof: anybody who reaches the port can send one."""
WRONG_TOKEN = "token"  # noqa: S105 (the word for it)
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 30_000))
"""A machine that is gone says nothing: its connection ends after half a minute."""


class WrongToken(ConfigError):
    """The other side has another token."""


class TokenChannel:
    """Messages to and from the other side, which has proved the token."""

    def __init__(self, streams: Streams, sealer: Sealer, opener: Opener) -> None:
        self._reader, self._writer = streams
        if isinstance(self._reader, ProvingReader):
            self._reader.proved()
        self._sealer, self._opener = sealer, opener

    @property
    def own_address(self) -> str:
        """Own address on the way to the other side."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def other_address(self) -> str:
        return str(self._writer.get_extra_info("peername")[0])

    def send(self, kind: str, **values: Any) -> None:
        """Send at once, without waiting. A closed connection takes nothing."""
        if not self._writer.is_closing():
            self._writer.write(self._sealer.seal({"kind": kind, **values}))

    async def receive(self) -> dict[str, Any]:
        """The next message. EOFError when the other side closed, ContractError for what is not its next message, OSError."""
        return self._opener.open(await next_line(self._reader))

    def abort(self) -> None:
        """Give the connection up, with what was not sent yet."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close once all is sent."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def _handshake(token: LaunchToken, challenge: str, nonce: str) -> Handshake:
    return Handshake(token.key, FORMAT, 0, challenge, nonce)


async def listen(taken: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any], address: str, port: int) -> asyncio.Server:
    """A server on this address alone, whose connections `taken` gets from `start_serving` on. Raises OSError."""

    def protocol() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(ProvingReader(PROOF_BYTES_MAX), taken)

    return await asyncio.get_running_loop().create_server(protocol, address, port, start_serving=False)


async def accept(streams: Streams, token: LaunchToken) -> TokenChannel:
    """Accept a joiner. Raises ContractError for one without the token, who gets the same answer whatever was wrong; EOFError, OSError,
    TimeoutError.
    """
    async with asyncio.timeout(PROOF_SECONDS):
        reader, writer = streams
        _keep_alive(writer)
        challenge = new_nonce()
        send_plain(writer, {"format": FORMAT, "nonce": challenge})
        answer = read_object(await next_line(reader))
        nonce = answer.get("nonce")
        handshake = _handshake(token, challenge, nonce if isinstance(nonce, str) else "")
        try:
            require_proof(handshake.agent_proof(), answer.get("proof"))
        except ProofError:
            send_plain(writer, {"refused": WRONG_TOKEN})
            await writer.drain()
            raise ProofError("it has another token") from None
        send_plain(writer, {"proof": handshake.coordinator_proof()})
        return TokenChannel(streams, Sealer(handshake.to_agent()), Opener(handshake.to_coordinator()))


async def connect(address: tuple[str, int], token: LaunchToken) -> TokenChannel:
    """Connect as a joiner. Raises WrongToken, ContractError for something else than a launch, EOFError, OSError, TimeoutError."""
    async with asyncio.timeout(PROOF_SECONDS):
        loop, reader = asyncio.get_running_loop(), ProvingReader(PROOF_BYTES_MAX)
        transport, protocol = await loop.create_connection(lambda: asyncio.StreamReaderProtocol(reader), *address)
        streams = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            return await _prove(streams, token, "{}:{}".format(*address))
        except BaseException:
            transport.abort()
            raise


async def _prove(streams: Streams, token: LaunchToken, where: str) -> TokenChannel:
    reader, writer = streams
    _keep_alive(writer)
    challenge = read_object(await next_line(reader))
    if challenge.get("format") != FORMAT or not isinstance(challenge.get("nonce"), str):
        raise ConfigError(
            f"{where} speaks {repr(challenge.get('format'))[:60]}, and this lockstep {FORMAT}: is it the port that lockstep launch printed,"
            " by the same version?"
        )
    nonce = new_nonce()
    handshake = _handshake(token, challenge["nonce"], nonce)
    send_plain(writer, {"nonce": nonce, "proof": handshake.agent_proof()})
    answer = read_object(await next_line(reader))
    if answer.get("refused") == WRONG_TOKEN:
        raise WrongToken(f"the launch at {where} has another token: give the one that it has shown, or its file by --token-file")
    require_proof(handshake.coordinator_proof(), answer.get("proof"))
    return TokenChannel(streams, Sealer(handshake.to_coordinator()), Opener(handshake.to_agent()))


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    send_at_once(writer)
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
