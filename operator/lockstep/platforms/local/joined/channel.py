"""Connection between a launch and a joiner: both prove the token, and hear soon when the other machine is gone."""

from __future__ import annotations

import asyncio
import socket

from lockstep.api.errors import ConfigError
from lockstep.platforms.local.joined.token import LaunchToken
from lockstep_gang.contract import channel
from lockstep_gang.contract.channel import Channel, OtherFormat, Unproved
from lockstep_gang.contract.lines import PROOF_SECONDS, Streams, send_plain
from lockstep_spec.handshake import ProofError

FORMAT = "lockstep-launch/2"
WRONG_TOKEN = "token"  # noqa: S105 (the word for it)
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 30_000))
"""A machine that is gone says nothing: its connection ends after half a minute."""


class WrongToken(ConfigError):
    """The other side has another token."""


async def accept(streams: Streams, token: LaunchToken) -> Channel:
    """Accept a joiner. Raises ContractError for one without the token, who gets the same answer whatever was wrong; EOFError, OSError,
    TimeoutError.
    """
    writer = streams[1]
    async with asyncio.timeout(PROOF_SECONDS):
        try:
            _, proved = await channel.accept(streams, token.key, FORMAT, 1, FORMAT)
        except ProofError:
            send_plain(writer, {"refused": WRONG_TOKEN})
            await writer.drain()
            raise ProofError("it has another token") from None
    return _kept_alive(proved)


async def connect(address: tuple[str, int], token: LaunchToken) -> Channel:
    """Connect as a joiner. Raises WrongToken, ContractError for something else than a launch, EOFError, OSError, TimeoutError."""
    where = "{}:{}".format(*address)
    try:
        return _kept_alive(await channel.connect(address, token.key, FORMAT, 0, FORMAT))
    except OtherFormat as error:
        raise ConfigError(
            f"{where} speaks {error.spoken}, and this lockstep {FORMAT}: is it the port that lockstep launch printed, by the same version?"
        ) from None
    except Unproved:
        raise WrongToken(f"the launch at {where} has another token: give the one that it has shown, or its file by --token-file") from None


def _kept_alive(proved: Channel) -> Channel:
    proved.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        proved.connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return proved
