"""Names of the other nodes, and a port that they can reach: open for the time of a preflight, to holders of the job's key only."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable

from lockstep_gang.contract.channel import accept, connect
from lockstep_gang.contract.lines import PROOF_BYTES_MAX, PROOF_SECONDS
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.network import any_free_port, listening_addresses
from lockstep_spec.codec import ContractError

PURPOSE = "preflight"
RESOLVE_SECONDS = 5.0
"""A pod's name may take this long to be known after its agent is."""
REACH_SECONDS = 5.0


def unresolved(addresses: Iterable[str]) -> dict[str, str]:
    """Address → why its name has none, for those that still have none after a while."""
    waiting = dict.fromkeys(addresses, "")
    end = time.monotonic() + RESOLVE_SECONDS
    while True:
        waiting = {address: why for address in waiting if (why := _why_unresolved(address))}
        if not waiting or time.monotonic() >= end:
            return waiting
        time.sleep(0.2)


def _why_unresolved(address: str) -> str:
    try:
        socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    return ""


class ProbePort:
    """The port that the others knock at: whoever doesn't prove the job's key gets nothing, and whoever does, a proof."""

    def __init__(self, run: Run, key: bytes, node: int) -> None:
        self._run, self._key, self._node = run, key, node
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listen, and return the port. Raises OSError."""
        address = self._run.addresses[self._node]
        port = any_free_port(address)  # port 0 would be another one for each family
        self._server = await asyncio.start_server(self._knock, listening_addresses(address), port, limit=PROOF_BYTES_MAX)
        return port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _knock(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(accept((reader, writer), self._key, _purpose(self._run), self._run.nodes), PROOF_SECONDS)
            await writer.drain()
        except (ContractError, EOFError, OSError, asyncio.TimeoutError):  # noqa: UP041 (another class in Python 3.10)
            pass  # the one who knocked says what it met
        finally:
            writer.close()


async def why_unreachable(run: Run, key: bytes, node: int, peer: int, port: int) -> str:
    """Reason why a peer's port can't be reached, or the key not be proved both ways; '' when both work."""
    try:
        channel = await asyncio.wait_for(connect((run.addresses[peer], port), key, _purpose(run), node), REACH_SECONDS)
    except asyncio.TimeoutError:  # noqa: UP041
        return f"no answer in {REACH_SECONDS:.0f} s"
    except (ContractError, EOFError, OSError) as error:
        return getattr(error, "strerror", None) or str(error)
    channel.close()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(channel.wait_closed(), 1.0)
    return ""


def _purpose(run: Run) -> str:
    """Text that is proved here and nowhere else, so that this proof opens no other port."""
    return f"{run.job.uid} {PURPOSE}"
