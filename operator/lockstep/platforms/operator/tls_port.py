"""A port that strangers may knock at: who gets a connection, and for how long.

The operator's Lease is renewed by the same event loop, so what costs much (a handshake, a request) is bounded before any of it is done: by
address, by namespace and in all. Whoever comes too often is turned away at the accept, which costs microseconds. Nobody is made to wait in
a queue: coordinators, kubelets and Prometheus come again by themselves.

A connection that a job's key has proven leaves the places of strangers, and may stay for the job's next report. Where places run out, the
namespace that holds most of them gives up its oldest; strangers count as one namespace. So no tenant can take what others need, and a
tenant that is alone may use it all.

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
from asyncio import sslproto
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from aiohttp import web

from lockstep_gang.contract.run import JobIdentity

HANDSHAKE_SECONDS = 5.0
HEADERS_SECONDS = 5.0
"""Seconds from the end of the handshake to the end of the request's headers."""
CONNECTION_SECONDS = 30.0
"""Seconds for one request: its body, an answer that waits for the API server, and a peer that reads it slowly."""
KEPT_SECONDS = 60.0
"""Seconds for which a job's connection waits for the next report: coordinators report every 15 seconds."""
JOB_CONNECTIONS = 2
"""One stays; a second one comes where the first was lost on its way."""
KNOWN_SECONDS = 120.0
KNOWN_MAX = 16384
TLS_BYTES = 16384
"""Buffer of a connection's TLS, the largest record, instead of asyncio's 256 KiB: thousands of connections stay."""
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
    """`rate` and `peer_rate` are connections a second: `rate` for strangers and for each namespace, as many again for the `first` ones of
    each stranger's address in that second.
    """

    connections: int
    peer_connections: int
    handshakes: int
    rate: int
    peer_rate: int
    first: int = 1
    kept: int = 0
    """Connections of jobs that may stay beside `connections`."""


REPORTS = Limits(connections=512, peer_connections=16, handshakes=256, rate=150, peer_rate=20, kept=6000)
"""A connection takes 52 KB, a handshake one to two milliseconds."""
METRICS = Limits(connections=64, peer_connections=4, handshakes=32, rate=30, peer_rate=4)
PROBES = Limits(connections=64, peer_connections=4, handshakes=48, rate=200, peer_rate=10, first=4)
"""Without TLS, so that a flood of it costs little. A kubelet may make all of its probes in the same second."""
CROWD = 4
"""Multiple of `rate` that is taken from all namespaces and strangers before each gets no more than an address does."""


class Rate:
    """Connections that are taken in this second: no address and no namespace can use up what is there for the others."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._second = -1
        self._of_peer: Counter[str] = Counter()
        self._of_namespace: Counter[str] = Counter()

    def takes(self, peer: str, namespace: str = "") -> bool:
        """`namespace`: of the job that was heard from that address lately; "" for a stranger."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._of_peer, self._of_namespace = second, Counter(), Counter()
        mine, limits = self._of_peer[peer], self._limits
        most = limits.rate if namespace or mine >= limits.first else 2 * limits.rate
        if namespace and self._of_namespace.total() >= CROWD * limits.rate:
            most = min(most, limits.peer_rate)
        if mine >= limits.peer_rate or self._of_namespace[namespace] >= most:
            return False
        self._of_peer[peer] += 1
        self._of_namespace[namespace] += 1
        return True


@dataclass(eq=False)
class Connection:
    peer: str
    namespace: str
    """Namespace of the job that has proven itself here, before that of the one that was heard from the address lately; "" for strangers."""
    task: asyncio.Task[None] | None = None
    has_transport: bool = False
    """True once there is a transport, which closes the socket."""
    is_secured: bool = False
    """The handshake is done."""
    job_uid: str = ""
    """Uid of the job whose key signed what was sent here first; "" until then."""
    stays: bool = False
    """True if it may be used for the next report, too."""
    limit: asyncio.Timeout | None = None

    def lasts(self, seconds: float) -> None:
        """End it so many seconds from now."""
        if self.limit is not None:
            with contextlib.suppress(RuntimeError):  # it is ending
                self.limit.reschedule(asyncio.get_running_loop().time() + seconds)


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

    def __init__(self, listening: socket.socket, context: ssl.SSLContext | None, limits: Limits) -> None:
        self._listening = listening
        self._context = context
        self._limits = limits
        self._rate = Rate(limits)
        self._open: dict[Connection, None] = {}
        """Connections that have proven nothing, the longest there first."""
        self._of_job: dict[str, list[Connection]] = {}
        self._of_namespace: dict[str, dict[Connection, None]] = {}
        """Connections of jobs, the longest there first."""
        self._of_peer: Counter[str] = Counter()
        self._by_protocol: dict[asyncio.BaseProtocol, Connection] = {}
        self._known: dict[str, tuple[str, float]] = {}
        """Addresses from which a job was heard, its namespace, and until when that counts."""
        self._loop = asyncio.get_running_loop()

    def start(self, make: Callable[[], asyncio.Protocol]) -> None:
        """`make` is aiohttp's: a protocol for each connection."""
        self._make = make
        self._loop.add_reader(self._listening, self._accept)

    async def stop(self) -> None:
        """Close the port and every connection."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        tasks = {one.task for one in (*self._open, *self._by_protocol.values()) if one.task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def arrived(self, protocol: asyncio.BaseProtocol) -> None:
        """A request's headers are here."""
        if (connection := self._by_protocol.get(protocol)) is not None:
            connection.lasts(CONNECTION_SECONDS)

    def keeps(self, protocol: asyncio.BaseProtocol) -> bool:
        """Return True if the connection waits for another request."""
        connection = self._by_protocol.get(protocol)
        if connection is None or not connection.stays:
            return False
        connection.lasts(KEPT_SECONDS)
        return True

    def prove(self, protocol: asyncio.BaseProtocol, job: JobIdentity) -> None:
        connection = self._by_protocol.get(protocol)
        if connection is None:
            return
        self._known.pop(connection.peer, None)
        self._known[connection.peer] = job.namespace, self._loop.time() + KNOWN_SECONDS
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]  # the oldest
        if connection in self._open:
            self._leave(connection)
            self._admit(connection, job)

    def _admit(self, connection: Connection, job: JobIdentity) -> None:
        """Give it one of its job's places. It stays if there is room, or a namespace that holds more than its own."""
        if len(of_job := self._of_job.get(job.uid, [])) >= JOB_CONNECTIONS:
            self._drop(of_job[0])
        connection.job_uid, connection.namespace = job.uid, job.namespace
        mine = self._of_namespace.setdefault(job.namespace, {})
        connection.stays = sum(map(len, self._of_namespace.values())) < self._limits.kept
        largest = max(self._of_namespace.values(), key=len)
        if not connection.stays and len(largest) > len(mine) + 1:
            self._drop(next(iter(largest)))
            connection.stays = True
        mine[connection] = None
        self._of_job.setdefault(job.uid, []).append(connection)

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
            namespace, until = self._known.get(address[0], ("", 0.0))
            connection = Connection(address[0], namespace if until > self._loop.time() else "")
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
        """Return True if there is a place. If all are taken, the namespace that would have most of them gives up its oldest one."""
        limits = self._limits
        if self._of_peer[newcomer.peer] >= limits.peer_connections or not self._rate.takes(newcomer.peer, newcomer.namespace):
            return False
        here = [one for one in self._open if not one.is_secured]
        if len(here) < limits.handshakes:
            if len(self._open) < limits.connections:
                return True
            here = list(self._open)
        oldest = _oldest_of_most([*here, newcomer])
        self._drop(oldest)
        return oldest is not newcomer

    def _leave(self, connection: Connection) -> None:
        """Free its place."""
        if self._open.pop(connection, connection) is None:
            self._of_peer[connection.peer] -= 1
            if not self._of_peer[connection.peer]:
                del self._of_peer[connection.peer]
        if connection in self._of_namespace.get(connection.namespace, {}):
            of_namespace, of_job = self._of_namespace[connection.namespace], self._of_job[connection.job_uid]
            del of_namespace[connection]
            of_job.remove(connection)
            if not of_namespace:
                del self._of_namespace[connection.namespace]
            if not of_job:
                del self._of_job[connection.job_uid]

    def _drop(self, connection: Connection) -> None:
        """Cancel the connection. Its place is free at once, its task ends a little later."""
        self._leave(connection)
        if connection.task is not None and connection.task is not asyncio.current_task():
            connection.task.cancel()

    async def _serve(self, connection: Connection, accepted: socket.socket) -> None:
        protocol = _Watched(self._make())
        self._by_protocol[protocol.inner] = connection
        connection.has_transport = True
        try:
            handshake, shutdown = (None, None) if self._context is None else (HANDSHAKE_SECONDS, LINGER_SECONDS)
            async with asyncio.timeout(CONNECTION_SECONDS) as connection.limit:
                await self._loop.connect_accepted_socket(
                    lambda: protocol, accepted, ssl=self._context, ssl_handshake_timeout=handshake, ssl_shutdown_timeout=shutdown
                )
                connection.is_secured = True
                connection.lasts(HEADERS_SECONDS)
                await protocol.ended.wait()
        except (OSError, TimeoutError, asyncio.CancelledError) as error:  # it failed, took too long, or was dropped
            _forget(error)
        finally:
            self._drop(connection)
            del self._by_protocol[protocol.inner]
            if protocol.transport is not None and not protocol.ended.is_set():
                _abort(protocol.transport)


def _oldest_of_most(connections: list[Connection]) -> Connection:
    """Return the oldest connection of the addresses that have most of those of the namespace that has most."""
    sizes = Counter(one.namespace for one in connections)
    most = max(sizes, key=lambda namespace: (sizes[namespace], not namespace))
    mine = [one for one in connections if one.namespace == most]
    of_peer = Counter(one.peer for one in mine)
    largest = max(of_peer.values())
    return next(one for one in mine if of_peer[one.peer] == largest)


LISTENER: web.AppKey[Listener] = web.AppKey("listener", Listener)


def prove(request: web.Request, job: JobIdentity) -> None:
    """Note that the sender holds this job's key: its connection takes one of the job's places, and its address has room beside what
    strangers use up.
    """
    listener = request.app.get(LISTENER)
    if listener is not None:
        listener.prove(request.protocol, job)


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


@web.middleware
async def _timed(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    request.app[LISTENER].arrived(request.protocol)
    return await handler(request)


async def _close_after(request: web.Request, response: web.StreamResponse) -> None:
    """Close what isn't a job's after its answer, and what asked for something that it doesn't get: whoever wants another one is counted
    again.
    """
    if response.status not in (HTTPStatus.OK, HTTPStatus.CONFLICT) or not request.app[LISTENER].keeps(request.protocol):
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
async def serving(app: web.Application, host: str, port: int, context: ssl.SSLContext | None, limits: Limits) -> AsyncIterator[int]:
    """The port it listens on, until the block ends; without TLS if `context` is None."""
    sslproto.SSLProtocol.max_size = TLS_BYTES
    app.middlewares.append(_timed)
    app.on_response_prepare.append(_close_after)
    listening = listen(host, port)
    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, logger=_log, keepalive_timeout=KEPT_SECONDS, lingering_time=LINGER_SECONDS,
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
