"""A port of this machine's loopback that leads to a port of a pod's loopback, through the API server and with the caller's rights."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from socket import AF_INET, AF_INET6, SocketType, has_dualstack_ipv6, inet_aton
from typing import Any

from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import FRAME_BYTES, V4, refused
from lockstep.kube.kinds import path_of
from lockstep.programs import WORDS_MAX
from lockstep_machine.network import tcp_rows

HERE = "127.0.0.1"
DATA, ERROR = 0, 1
Say = Callable[[str], None]


@asynccontextmanager
async def forwarded(cluster: Cluster, namespace: str, pod: str, port: int, local: int, say: Say) -> AsyncIterator[int]:
    """Yield the local port: `local`, or another free one where that is taken."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _carry(cluster, namespace, pod, port, reader, writer, say)

    async with listening(carry, local) as chosen:
        yield chosen


@asynccontextmanager
async def listening(carry: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], local: int) -> AsyncIterator[int]:
    """Listen on this machine's loopback, at port `local` or at another free one where that is taken, and yield the port. What `carry` does
    for a connection ends with the block.
    """
    open_ones: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (this is one)
        open_ones.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # below, at the end: asyncio prints a traceback for each that ends by it
                await carry(reader, writer)
        finally:
            open_ones.discard(task)
            writer.close()

    server, other = await _listen(accepted, local)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        other.close()
        for task in list(open_ones):
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)


async def _listen(accepted: Any, local: int) -> tuple[asyncio.Server, SocketType]:
    with contextlib.suppress(OSError):
        return await _listen_at(accepted, local)
    return await _listen_at(accepted, 0)


async def _listen_at(accepted: Any, port: int) -> tuple[asyncio.Server, SocketType]:
    server = await asyncio.start_server(accepted, HERE, port)
    try:
        return server, held(server.sockets[0].getsockname()[1])
    except OSError:
        server.close()
        raise


def held(port: int) -> SocketType:
    """Keep everybody from ::1 at a port that is ours at 127.0.0.1, until this is closed: for a name below localhost browsers ask there
    first, and would bring the token. Raises OSError where somebody listens there.
    """
    other = SocketType(AF_INET6 if has_dualstack_ipv6() else AF_INET)
    try:
        other.bind(("::1", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other.close()
            raise
    return other


def is_own(peer: tuple[str, int], here: tuple[str, int]) -> bool:
    """Return True if a connection of this machine's loopback was made by this user, by the kernel's table (on Linux; True elsewhere)."""
    rows = tcp_rows()
    ends = [f"{int.from_bytes(inet_aton(host), sys.byteorder):08X}:{port:04X}" for host, port in (peer, here)]
    own = {os.getuid(), int(os.environ.get("SUDO_UID", os.getuid()))}
    return not rows or any(words[1:3] == ends and int(words[7]) in own for words in rows)


async def _carry(
    cluster: Cluster, namespace: str, pod: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, say: Say
) -> None:
    """One connection, by a WebSocket of its own. Its end on either side ends it on the other: there is no half of one here."""
    try:
        socket = await cluster.stream(path_of("Pod", namespace, pod, "portforward"), [("ports", str(port))], (V4,))
    except ApiError as error:
        return say(str(refused(error, namespace, pod, "reach ports of pods", "pods/portforward")))
    except OSError as error:
        return say(str(error))
    ways = [asyncio.create_task(_to_pod(reader, socket)), asyncio.create_task(_from_pod(socket, writer, say))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        await socket.close()


async def _to_pod(reader: asyncio.StreamReader, socket: Any) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(FRAME_BYTES):
            await socket.send_bytes(bytes([DATA]) + data)


async def _from_pod(socket: Any, writer: asyncio.StreamWriter, say: Say) -> None:
    """The first message on every channel only names the port."""
    named: set[int] = set()
    with contextlib.suppress(ConnectionError):
        async for message in socket:
            data = message.data if isinstance(message.data, bytes) else b""
            if not data:
                continue
            channel, rest = data[0], data[1:]
            if channel not in named:
                named.add(channel)
            elif channel == ERROR:
                return say(rest[:WORDS_MAX].decode(errors="replace").strip())
            elif rest:
                writer.write(rest)
                await writer.drain()
