"""A TLS port that strangers may knock at: who gets a connection, for how long, and one request each.

The operator's Lease is renewed by the same event loop, so what costs much (a handshake, a request) is bounded before any of it is done: by
address and in all, and addresses from which a job was heard lately have room beside the others. Whoever comes too often is turned away at
the accept, which costs microseconds. Nobody is made to wait in a queue: coordinators, kubelets and Prometheus come again by themselves.

Not aiohttp's own TCPSite: it takes every connection, and has no limit of handshakes, of an address, or of a connection's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import struct
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web

HANDSHAKE_SECONDS = 5.0
HEADERS_SECONDS = 5.0
"""Seconds from the end of the handshake to the end of the request's headers."""
CONNECTION_SECONDS = 30.0
"""For all of it: handshake, headers, body, an answer that waits for the API server, and a peer that reads it slowly."""
KNOWN_SECONDS = 120.0
KNOWN_MAX = 4096
LINGER_SECONDS = 1.0
"""Seconds to read the rest of a body that was refused: closed at once, the sender would lose the answer."""
ACCEPTS = 512
"""Connections accepted in one turn of the event loop, 10 ms of it: with fewer, a flood fills the backlog, where the kernel drops whoever
comes.
"""
BACKLOG = 4096
HEADERS_MAX = 64
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOG_LINES = 5
"""A second, of what strangers cause."""


@dataclass(frozen=True)
class Limits:
    """`rate` and `peer_rate` are connections a second; as many as `rate` again are for addresses that come for the first time in that
    second.
    """

    connections: int
    peer_connections: int
    handshakes: int
    rate: int
    peer_rate: int


REPORTS = Limits(connections=96, peer_connections=16, handshakes=32, rate=100, peer_rate=20)
"""For strangers; coordinators that were heard lately have room beside it. A connection takes 0.3 MB (asyncio's TLS buffer), a handshake two
milliseconds.
"""
METRICS = Limits(connections=16, peer_connections=4, handshakes=8, rate=10, peer_rate=4)


class Rate:
    """Connections that are taken in this second: no address can use up what is there for the others."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._second = -1
        self._taken: Counter[str] = Counter()
        self._strangers = 0

    def takes(self, peer: str, *, known: bool = False) -> bool:
        """`known`: what strangers use up doesn't matter, and the other way round."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._taken, self._strangers = second, Counter(), 0
        mine = self._taken[peer]
        in_all = self._limits.rate if mine else 2 * self._limits.rate
        if mine >= self._limits.peer_rate or (not known and self._strangers >= in_all):
            return False
        self._taken[peer] += 1
        self._strangers += not known
        return True


@dataclass(eq=False)
class Connection:
    peer: str
    is_known: bool
    """A job was heard from that address lately."""
    task: asyncio.Task[None] | None = None
    has_transport: bool = False
    """True once there is a transport, which closes the socket."""
    is_secured: bool = False
    """The handshake is done."""
    is_proven: bool = False
    """True once what it sent was signed by a job's key."""


class _Watched(asyncio.Protocol):
    """aiohttp's protocol, its transport, and when it has ended."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self.inner = inner
        self.transport: asyncio.BaseTransport | None = None
        """From the end of the handshake on."""
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.inner.connection_lost(exc)
        self.ended.set()

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()


class Listener:
    """One port, from `start` to `stop`."""

    def __init__(self, listening: socket.socket, context: ssl.SSLContext, limits: Limits) -> None:
        self._listening = listening
        self._context = context
        self._limits = limits
        self._rate = Rate(limits)
        self._open: dict[Connection, None] = {}
        """The longest there first."""
        self._of_peer: Counter[str] = Counter()
        self._by_protocol: dict[asyncio.BaseProtocol, Connection] = {}
        self._known: dict[str, float] = {}
        """Addresses from which a job was heard, and until when that counts."""
        self._loop = asyncio.get_running_loop()

    def start(self, make: Callable[[], asyncio.Protocol]) -> None:
        """`make` is aiohttp's: a protocol for each connection."""
        self._make = make
        self._loop.add_reader(self._listening, self._accept)

    async def stop(self) -> None:
        """Close the port and every connection."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        tasks = [connection.task for connection in self._open if connection.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def prove(self, protocol: asyncio.BaseProtocol) -> None:
        connection = self._by_protocol.get(protocol)
        if connection is not None:
            connection.is_proven = True
            self._known.pop(connection.peer, None)
            self._known[connection.peer] = self._loop.time() + KNOWN_SECONDS
            if len(self._known) > KNOWN_MAX:
                del self._known[next(iter(self._known))]  # the oldest

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, address = self._listening.accept()
            except OSError as error:  # nobody is left, or whoever came is gone again
                if error.errno in _EXHAUSTED:  # the port would stay readable, and the loop do nothing else
                    _log.error("no connection can be taken for a second: %s", error)
                    self._loop.remove_reader(self._listening)
                    self._loop.call_later(1.0, self._accept_again)
                return
            connection = Connection(address[0], is_known=self._known.get(address[0], 0.0) > self._loop.time())
            if self._has_room(connection):
                accepted.setblocking(False)
                self._open[connection] = None
                self._of_peer[connection.peer] += 1
                connection.task = self._loop.create_task(self._serve(connection, accepted))
                connection.task.add_done_callback(partial(_close, connection, accepted))
            else:
                turn_away(accepted)

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _has_room(self, newcomer: Connection) -> bool:
        """Return True if there is a place. If all are taken, the oldest connection is closed: a stranger's if there is one, never one that
        has proven itself.
        """
        limits, known = self._limits, newcomer.is_known
        if self._of_peer[newcomer.peer] >= limits.peer_connections or not self._rate.takes(newcomer.peer, known=known):
            return False
        handshakes = [one for one in self._open if not one.is_secured and not one.is_known]
        if len(handshakes) >= limits.handshakes and not known:
            self._drop(handshakes[0])
        elif len(self._open) >= limits.connections:
            unproven = [one for one in self._open if not one.is_proven]
            if not unproven:
                return False
            self._drop(min(unproven, key=lambda one: one.is_known))
        return True

    def _drop(self, connection: Connection) -> None:
        """Cancel the connection. Its place is free at once, its task ends a little later."""
        if self._open.pop(connection, connection) is None:
            self._of_peer[connection.peer] -= 1
            if not self._of_peer[connection.peer]:
                del self._of_peer[connection.peer]
        if connection.task is not None and connection.task is not asyncio.current_task():
            connection.task.cancel()

    async def _serve(self, connection: Connection, accepted: socket.socket) -> None:
        protocol = _Watched(self._make())
        self._by_protocol[protocol.inner] = connection
        connection.has_transport = True
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                await self._loop.connect_accepted_socket(
                    lambda: protocol, accepted, ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS, ssl_shutdown_timeout=LINGER_SECONDS,
                )  # fmt: skip
                connection.is_secured = True
                await protocol.ended.wait()
        except (OSError, TimeoutError, asyncio.CancelledError) as error:  # it failed, took too long, or was dropped
            _forget(error)
        finally:
            self._drop(connection)
            del self._by_protocol[protocol.inner]
            if protocol.transport is not None and not protocol.ended.is_set():
                _abort(protocol.transport)


LISTENER: web.AppKey[Listener] = web.AppKey("listener", Listener)


def prove(request: web.Request) -> None:
    """Note that the sender holds a job's key: its connection isn't given up for another one, and its address has room beside what strangers
    use up.
    """
    listener = request.app.get(LISTENER)
    if listener is not None:
        listener.prove(request.protocol)


def _forget(error: BaseException | None) -> None:
    """Frames of a traceback hold the connection, which holds the exception: such a ring, with its buffers, would stay until the garbage
    collector looks at the oldest objects.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _abort(transport: asyncio.BaseTransport) -> None:
    """Abort the transport. With Python 3.11.2, which is Debian 12's, a TLS transport that was closed twice can't be aborted; it ends by
    ssl_shutdown_timeout then.
    """
    with contextlib.suppress(AttributeError):
        transport.abort()  # type: ignore[attr-defined]


def _close(connection: Connection, accepted: socket.socket, _: asyncio.Task[None]) -> None:
    """Close the socket of a task that was dropped before it began. A transport knows its socket by its number: were that closed under it,
    the next connection would get the number, and the loop would not watch it.
    """
    if not connection.has_transport:
        accepted.close()


def turn_away(accepted: socket.socket) -> None:
    """Close with a reset: the kernel then remembers nothing of it."""
    with contextlib.suppress(OSError):
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()


class Seldom(logging.Filter):
    """Most log lines a second; what strangers cause must not fill a log."""

    def __init__(self, lines: int = LOG_LINES, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._lines = lines
        self._clock = clock
        self._second, self._written, self._left_out = -1, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(self._clock())
        if second != self._second:
            if self._left_out:
                record.msg = f"{record.msg} ({self._left_out} lines before this one were left out)"
            self._second, self._written, self._left_out = second, 0, 0
        self._written += 1
        self._left_out += self._written > self._lines
        return self._written <= self._lines


_log = logging.getLogger("lockstep.http")
_log.addFilter(Seldom())


async def _close_after(request: web.Request, response: web.StreamResponse) -> None:
    """One request a connection: whoever wants another one is counted again. Coordinators and kubelets ask for no more."""
    del request
    response.force_close()
    response.headers["Connection"] = "close"
    response.headers["Server"] = "lockstep"  # and not which versions of what


def listen(host: str, port: int) -> socket.socket:
    """`host` "": every address of this machine, of both families."""
    if not host and socket.has_dualstack_ipv6():
        listening = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listening.setblocking(False)
    return listening


@asynccontextmanager
async def serving(app: web.Application, host: str, port: int, context: ssl.SSLContext, limits: Limits = REPORTS) -> AsyncIterator[int]:
    """The port it listens on, until the block ends."""
    app.on_response_prepare.append(_close_after)
    listening = listen(host, port)
    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, logger=_log, keepalive_timeout=HEADERS_SECONDS, lingering_time=LINGER_SECONDS,
        auto_decompress=False, max_headers=HEADERS_MAX,
    )  # fmt: skip
    app[LISTENER] = listener = Listener(listening, context, limits)
    await runner.setup()
    assert runner.server is not None  # noqa: S101 (after setup)
    try:
        listener.start(runner.server)
        yield int(listening.getsockname()[1])
    finally:
        await listener.stop()
        await runner.cleanup()
