"""The limits of the operator's ports, over real TLS sockets: each closes or turns away what it is for, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from lockstep.platforms.operator import tls_port
from lockstep.platforms.operator.certificate import make_certificates
from lockstep.platforms.operator.report_server import tls_context
from lockstep.platforms.operator.tls_port import METRICS, PROBES, REPORTS, Connection, Limits, Listener, Rate, Seldom, prove, serving
from lockstep_gang.contract.run import JobIdentity
from unit.virtual_time import VirtualClock

CERTIFICATES = make_certificates(("localhost",), datetime.now(UTC))
CONTEXT = tls_context(CERTIFICATES)
ROOMY = Limits(connections=100, peer_connections=100, handshakes=100, rate=1000, peer_rate=1000)
PATIENCE_SECONDS = 100.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
JOB = JobIdentity("x", "ns", "job-uid")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Scene:
    """A port with a page, and those who knock at it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked = asyncio.Event()
        self.release = asyncio.Event()
        self.gone = asyncio.Event()
        """The answer that is too large to be sent at once was ended."""
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, address: str = "127.0.0.1", *, tls: bool = True) -> Streams:
        trusting = ssl.create_default_context(cadata=CERTIFICATES.ca_cert) if tls else None
        host = {"server_hostname": "localhost"} if tls else {}
        streams = await asyncio.open_connection("127.0.0.1", self.port, ssl=trusting, local_addr=(address, 0), **host)
        self._writers.append(streams[1])
        return streams

    async def code(self, streams: Streams, request: bytes = GET) -> int:
        """Of the answer; 0: the connection was closed instead."""
        streams[1].write(request)
        line = await streams[0].readline()
        return int(line.split()[1]) if line else 0

    async def served(self, address: str = "127.0.0.1") -> bool:
        try:
            return await self.code(await self.connect(address)) == 200
        except ConnectionError:
            return False

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def in_one_second(limits: Limits) -> Rate:
    return Rate(limits, lambda: 0.0)


@asynccontextmanager
async def scene_of(limits: Limits = ROOMY, context: ssl.SSLContext | None = CONTEXT) -> AsyncIterator[Scene]:
    """A scene at a port with these limits."""
    scene: Scene

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="here")

    async def large(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        finally:
            scene.gone.set()

    async def stay(request: web.Request) -> web.Response:
        """Until it is released, as a report that waits for the API server."""
        if "Proven" in request.headers:
            prove(request, JOB)
        scene.asked.set()
        await scene.release.wait()
        return web.Response(text="done")

    async def proving(request: web.Request) -> web.Response:
        """For the job that the query names."""
        namespace, uid = request.query.get("namespace", JOB.namespace), request.query.get("uid", JOB.uid)
        prove(request, JobIdentity("x", namespace, uid))
        return web.Response(text="heard", status=int(request.query.get("status", "200")))

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_get("/large", large)
    app.router.add_get("/stay", stay)
    app.router.add_get("/prove", proving)
    app.router.add_post("/echo", echo)
    async with serving(app, "", 0, context, limits) as port, asyncio.timeout(PATIENCE_SECONDS):
        scene = Scene(port)
        try:
            yield scene
        finally:
            scene.release.set()
            await scene.close()


async def is_closed(streams: Streams) -> bool:
    with contextlib.suppress(ConnectionError):
        return await streams[0].read() == b""
    return True


async def silence(scene: Scene) -> None:
    """A connection without a handshake."""
    assert await is_closed(await scene.connect(tls=False))


async def no_request(scene: Scene) -> None:
    assert await is_closed(await scene.connect())


async def half_of_the_headers(scene: Scene) -> None:
    streams = await scene.connect()
    streams[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n")
    assert await is_closed(streams)


async def headers_byte_by_byte(scene: Scene) -> None:
    slow = await scene.connect()

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            slow[1].write(b"GET / HTTP/1.1\r\n")
            while True:
                slow[1].write(b"a: b\r\n"[:3])
                await slow[1].drain()
                await asyncio.sleep(0.2)

    dripping = asyncio.ensure_future(drip())
    assert await is_closed(slow)
    dripping.cancel()


async def an_answer_that_never_comes(scene: Scene) -> None:
    assert await scene.code(await scene.connect(), GET.replace(b"/ ", b"/stay ", 1)) == 0


async def an_answer_that_is_read_slowly(scene: Scene) -> None:
    _, writer = await scene.connect()
    writer.write(GET.replace(b"/ ", b"/large ", 1))
    cast(asyncio.ReadTransport, writer.transport).pause_reading()
    await scene.gone.wait()


async def a_kept_connection_without_another_report(scene: Scene) -> None:
    streams = await scene.connect()
    assert await answer(streams, heard()) == (200, True)
    assert await is_closed(streams)


async def a_second_report_that_gets_no_answer(scene: Scene) -> None:
    streams = await scene.connect()
    assert await answer(streams, heard()) == (200, True)
    await asyncio.sleep(10)
    assert await answer(streams, GET.replace(b"/ ", b"/stay ", 1)) == (0, False)


async def a_refused_body_that_never_comes(scene: Scene) -> None:
    streams = await scene.connect()
    assert await scene.code(streams, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n") == 405
    await streams[0].read()


@pytest.mark.parametrize(
    ("test", "seconds"),
    [
        (silence, 5),
        (no_request, 5),
        (half_of_the_headers, 5),
        (headers_byte_by_byte, 5),
        (an_answer_that_never_comes, 30),
        (an_answer_that_is_read_slowly, 30),
        (a_kept_connection_without_another_report, 60),
        (a_second_report_that_gets_no_answer, 40),
        (a_refused_body_that_never_comes, 1),
    ],
)
async def test_nobody_is_waited_for_any_longer(test: Callable[[Scene], Awaitable[None]], seconds: float, clock: VirtualClock) -> None:
    async with scene_of(KEPT) as scene:
        await test(scene)
    assert clock.now - 1000.0 == pytest.approx(seconds, abs=0.5)


async def test_a_connection_is_for_one_request() -> None:
    async with scene_of() as scene:
        reader, writer = await scene.connect()
        writer.write(GET * 100)
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200 OK") == 1
        assert b"Connection: close" in answers


@pytest.mark.parametrize(
    "request_", [b"\x00junk\r\n\r\n", GET.replace(b"\r\n\r\n", b"\r\na: b" * 100 + b"\r\n\r\n")], ids=["junk", "headers"]
)
async def test_what_is_no_request_gets_one_answer_and_the_next_one_is_served(request_: bytes) -> None:
    async with scene_of() as scene:
        streams = await scene.connect()
        assert await scene.code(streams, request_) == 400
        await streams[0].read()
        assert await scene.served()


async def test_a_body_is_never_inflated() -> None:
    async with scene_of() as scene:
        packed = zlib.compress(b"0" * 1000)
        head = f"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate\r\nContent-Length: {len(packed)}\r\n\r\n"
        reader, writer = await scene.connect()
        writer.write(head.encode() + packed)
        assert (await reader.read()).endswith(packed)


async def test_one_address_has_so_many_connections_and_others_have_theirs() -> None:
    async with scene_of(replace(ROOMY, peer_connections=2)) as scene:
        held = [await scene.connect("127.0.0.2") for _ in range(2)]
        assert not await scene.served("127.0.0.2")
        assert await scene.served("127.0.0.3")
        for streams in held:
            assert await scene.code(streams) == 200
            await streams[0].read()
        assert await scene.served("127.0.0.2")


async def test_whoever_is_gone_has_left_the_place_also_where_python_can_not_abort_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's Python raises AttributeError then; each answered probe of a kubelet took a place for good."""
    monkeypatch.setattr("asyncio.sslproto._SSLProtocolTransport.abort", lambda transport: transport._ssl_protocol._abort(None))

    async with scene_of(replace(ROOMY, peer_connections=2)) as scene:
        for _ in range(6):
            streams = await scene.connect()
            assert await scene.code(streams) == 200
            await streams[0].read()
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()


async def test_where_all_places_are_taken_the_newcomer_gets_that_of_who_is_there_longest_and_proved_nothing() -> None:
    async with scene_of(replace(ROOMY, connections=2)) as scene:
        proven = await scene.connect("127.0.0.2")
        proven[1].write(b"GET /stay HTTP/1.1\r\nHost: x\r\nProven: yes\r\n\r\n")
        await scene.asked.wait()
        first, second = [await scene.connect(f"127.0.0.{number}") for number in (3, 4)]
        assert await scene.served("127.0.0.5")
        assert await is_closed(first)
        assert await scene.code(second) == 200
        scene.release.set()
        assert await scene.code(proven, b"") == 200


PROVE = b"GET /prove HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_addresses_of_jobs_have_room_whatever_strangers_use_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_port, "Rate", in_one_second)

    async with scene_of(replace(ROOMY, rate=2)) as scene:
        assert await scene.code(await scene.connect("127.0.0.2"), PROVE) == 200
        results = await asyncio.gather(*(scene.served(f"127.0.1.{number}") for number in range(1, 10)))
        assert sum(results) == 3  # and the first one
        assert await scene.served("127.0.0.2")


@pytest.mark.parametrize("tls", [True, False])
async def test_strangers_make_room_before_addresses_of_jobs_do(tls: bool) -> None:
    async with scene_of(replace(ROOMY, connections=2) if tls else replace(ROOMY, handshakes=2)) as scene:
        assert await scene.code(await scene.connect("127.0.0.2"), PROVE) == 200
        job = await scene.connect("127.0.0.2", tls=tls)  # the longest there
        stranger = await scene.connect("127.0.0.3", tls=tls)
        assert await scene.served("127.0.0.4")
        assert await is_closed(stranger)
        assert await scene.served("127.0.0.5")
        if tls:
            assert await scene.code(job) == 200
        else:
            assert not job[0].at_eof()


async def test_an_address_is_known_for_a_while_after_its_job_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_port, "KNOWN_SECONDS", 0.0)
    monkeypatch.setattr(tls_port, "Rate", in_one_second)

    async with scene_of(replace(ROOMY, rate=1)) as scene:
        assert await scene.code(await scene.connect("127.0.0.2"), PROVE) == 200
        assert not await scene.served("127.0.0.2")


async def test_who_is_dropped_as_the_handshake_ends_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next connection gets the number that the closed socket had. The event loop must know that it is another one."""
    listeners: list[Listener] = []

    class Dropping(Listener):
        def start(self, make: Callable[[], asyncio.Protocol]) -> None:
            listeners.append(self)
            super().start(make)

    class DroppedOnce(tls_port._Watched):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            if listeners:
                listener = listeners.pop()
                listener._drop(next(iter(listener._open)))

    monkeypatch.setattr(tls_port, "Listener", Dropping)
    monkeypatch.setattr(tls_port, "_Watched", DroppedOnce)

    async with scene_of() as scene:
        loop, context = asyncio.get_running_loop(), ssl.create_default_context(cadata=CERTIFICATES.ca_cert)
        with socket.socket() as first, socket.socket() as second:  # made first: the number that is freed is then for the accepted one
            await loop.run_in_executor(None, first.connect, ("127.0.0.1", scene.port))
            with context.wrap_socket(first, server_hostname="localhost", do_handshake_on_connect=False) as silent:
                await loop.run_in_executor(None, silent.do_handshake)  # and it never says good-bye
                second.setblocking(False)
                await loop.sock_connect(second, ("127.0.0.1", scene.port))
                streams = await asyncio.wait_for(asyncio.open_connection(sock=second, ssl=context, server_hostname="localhost"), 4)
                assert await scene.code(streams) == 200
                streams[1].close()


async def test_so_many_addresses_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_port, "KNOWN_MAX", 2)
    monkeypatch.setattr(tls_port, "Rate", in_one_second)

    async with scene_of(replace(ROOMY, rate=3)) as scene:
        for number in (2, 3, 2, 4):
            assert await scene.code(await scene.connect(f"127.0.0.{number}"), PROVE) == 200
        assert [await scene.served(f"127.0.0.{number}") for number in (2, 3, 4)] == [True, False, True]


KEPT = replace(ROOMY, kept=100)


def heard(namespace: str = "ns", uid: str = "job-uid", status: int = 200) -> bytes:
    return f"GET /prove?namespace={namespace}&uid={uid}&status={status} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def answer(streams: Streams, request: bytes) -> tuple[int, bool]:
    """Its status, and True if the connection stays; (0, False): it was closed instead."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        streams[1].write(request)
        head = (await streams[0].readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        await streams[0].readexactly(length)
        return int(head.split()[1]), "connection: close" not in head.lower()
    return 0, False


async def test_a_job_s_connection_stays_for_its_next_report() -> None:
    async with scene_of(replace(KEPT, peer_rate=1, peer_connections=1)) as scene:
        streams = await scene.connect()
        assert [await answer(streams, heard()) for _ in range(3)] == [(200, True)] * 3


async def test_one_who_asks_for_no_more_is_served_as_before() -> None:
    """Coordinators of the version before close after each report."""

    async with scene_of(replace(KEPT, kept=2)) as scene:
        for _ in range(5):
            streams = await scene.connect()
            assert await scene.code(streams, heard()) == 200
            streams[1].close()


async def test_connections_of_jobs_take_no_place_of_their_address() -> None:
    async with scene_of(replace(KEPT, peer_connections=1)) as scene:
        for number in range(5):
            assert await answer(await scene.connect(), heard(uid=f"job-{number}")) == (200, True)


@pytest.mark.parametrize("status", [400, 401, 429, 503])
async def test_a_connection_ends_with_the_first_refusal(status: int) -> None:
    async with scene_of(KEPT) as scene:
        streams = await scene.connect()
        assert await answer(streams, heard()) == (200, True)
        assert await answer(streams, heard(status=status)) == (status, False)
        assert await is_closed(streams)


async def test_a_job_has_two_connections_and_the_third_ends_its_oldest() -> None:
    async with scene_of(KEPT) as scene:
        first, second, third = [await scene.connect() for _ in range(3)]
        for streams in (first, second, third):
            assert await answer(streams, heard()) == (200, True)
        assert await is_closed(first)
        assert [await answer(streams, heard()) for streams in (second, third)] == [(200, True)] * 2


async def test_where_no_more_may_stay_a_report_is_answered_and_its_connection_closed() -> None:
    async with scene_of(replace(KEPT, kept=2)) as scene:
        streams = [await scene.connect() for _ in range(4)]
        answers = [await answer(one, heard(uid=f"job-{number}")) for number, one in enumerate(streams)]
        assert answers == [(200, True), (200, True), (200, False), (200, False)]
        assert await answer(streams[0], heard(uid="job-0")) == (200, True)


async def test_a_namespace_makes_room_for_another_that_has_fewer_connections() -> None:
    async with scene_of(replace(KEPT, kept=4)) as scene:
        flood = [await scene.connect() for _ in range(4)]
        for number, one in enumerate(flood):
            assert await answer(one, heard("mallory", f"job-{number}")) == (200, True)
        alice = await scene.connect()
        assert await answer(alice, heard("alice", "train")) == (200, True)
        assert await is_closed(flood[0])
        await answer(await scene.connect(), heard("mallory", "job-9"))
        assert await answer(alice, heard("alice", "train")) == (200, True)


async def test_addresses_of_one_namespace_s_jobs_take_no_places_of_others() -> None:
    """They signed a report each, and then come with connections that say nothing."""

    async with scene_of(replace(ROOMY, connections=6)) as scene:
        for number in range(2, 6):
            assert await scene.code(await scene.connect(f"127.0.0.{number}"), heard("mallory", f"job-{number}")) == 200
        assert await scene.code(await scene.connect("127.0.1.1"), heard("alice", "train")) == 200
        alice, stranger = await scene.connect("127.0.1.1"), await scene.connect("127.0.2.1")
        flood = [await scene.connect(f"127.0.0.{number}") for number in (2, 3, 4, 5, 2, 3)]
        assert [await is_closed(one) for one in flood[:2]] == [True, True]
        assert [await scene.code(one) for one in (alice, stranger)] == [200, 200]


@pytest.mark.parametrize(("namespace", "taken"), [("mallory", 4), ("", 4 + 4)])
def test_a_namespace_has_as_many_connections_a_second_as_strangers_have(namespace: str, taken: int) -> None:
    rate = Rate(replace(ROOMY, rate=4), lambda: 0.0)
    assert sum(rate.takes(f"peer-{number}", namespace) for number in range(20)) == taken
    assert rate.takes("train-0", "alice")


def test_where_many_namespaces_come_each_has_what_an_address_has() -> None:
    rate = Rate(replace(ROOMY, rate=4, peer_rate=2), lambda: 0.0)
    for namespace in "abcd":
        assert sum(rate.takes(f"{namespace}{number}", namespace) for number in range(9)) == 4
    assert sum(rate.takes(f"e{number}", "e") for number in range(9)) == 2


async def test_the_port_of_probes_asks_for_no_tls(clock: VirtualClock) -> None:
    async with scene_of(context=None) as scene:
        streams = await scene.connect(tls=False)
        assert await answer(streams, GET) == (200, False)
        assert await is_closed(await scene.connect(tls=False))  # it said nothing for five seconds
    assert clock.now - 1000.0 == pytest.approx(5.0, abs=0.5)


async def test_handshakes_that_are_not_finished_give_way_to_newer_ones() -> None:
    async with scene_of(replace(ROOMY, handshakes=2)) as scene:
        secured = await scene.connect("127.0.0.2")
        first, second = [await scene.connect(f"127.0.0.{number}", tls=False) for number in (3, 4)]
        assert await scene.served("127.0.0.5")
        assert await is_closed(first)
        assert not second[0].at_eof()
        assert await scene.code(secured) == 200


def test_one_address_has_so_many_connections_a_second() -> None:
    clock = [0.0]
    rate = Rate(replace(ROOMY, peer_rate=2), lambda: clock[0])
    assert [rate.takes("a") for _ in range(4)] == [True, True, False, False]
    assert rate.takes("b")
    clock[0] = 1.0
    assert rate.takes("a")


def test_who_comes_for_the_first_time_in_a_second_is_taken_when_the_others_have_used_up_theirs() -> None:
    rate = Rate(replace(ROOMY, rate=4, peer_rate=3), lambda: 0.0)
    assert [rate.takes(peer) for peer in "aaabb"] == [True, True, True, True, False]
    assert [rate.takes(peer) for peer in "cdefg"] == [True, True, True, True, False]


def test_a_kubelet_makes_all_its_probes_of_a_second_when_the_others_have_used_up_theirs() -> None:
    rate = Rate(tls_port.PROBES, lambda: 0.0)
    flood = [rate.takes(str(number % 20)) for number in range(1000)]
    assert sum(flood) == 200 and [rate.takes("kubelet") for _ in range(4)] == [True] * 4


async def test_among_strangers_the_address_with_most_connections_gives_up_its_oldest() -> None:
    async with scene_of(replace(ROOMY, connections=3)) as scene:
        probe = await scene.connect("127.0.0.2")
        flood = [await scene.connect("127.0.0.3") for _ in range(2)]
        assert await scene.served("127.0.0.4")
        assert await is_closed(flood[0])
        assert await scene.code(probe) == 200


async def test_a_flood_of_connections_is_turned_away_at_the_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    secured: list[str] = []
    serve = Listener._serve

    async def counted(self: Listener, connection: Any, accepted: socket.socket) -> None:
        secured.append(connection.peer)
        await serve(self, connection, accepted)

    monkeypatch.setattr(Listener, "_serve", counted)
    monkeypatch.setattr(tls_port, "Rate", in_one_second)

    async with scene_of(replace(ROOMY, peer_rate=3)) as scene:
        results = await asyncio.gather(*(scene.served("127.0.0.2") for _ in range(50)))
        assert sum(results) == 3
        assert len(secured) == 3
        assert await scene.served("127.0.0.3")


async def test_a_process_without_file_descriptors_tries_again_a_little_later() -> None:
    class Exhausted:
        """A listening socket at its limit: always readable, and never accepting."""

        accepts = 0

        def accept(self) -> None:
            self.accepts += 1
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return 0

    loop, exhausted = asyncio.get_running_loop(), Exhausted()
    listener = Listener(exhausted, tls_context(CERTIFICATES), ROOMY)  # type: ignore[arg-type]
    readers: list[str] = []
    later: list[Callable[[], None]] = []
    loop.remove_reader = lambda _: bool(readers.append("removed"))  # type: ignore[method-assign,assignment,func-returns-value]
    loop.add_reader = lambda *_: readers.append("added")  # type: ignore[method-assign,assignment]
    loop.call_later = lambda seconds, callback: later.append(callback)  # type: ignore[method-assign,assignment]
    try:
        listener._accept()
        assert (readers, exhausted.accepts) == (["removed"], 1)
        later[0]()
        assert readers == ["removed", "added"]
    finally:
        del loop.remove_reader, loop.add_reader, loop.call_later


async def test_connections_that_failed_are_gone_without_the_garbage_collector() -> None:
    """Each would keep a third of a megabyte until it looks at the oldest objects."""

    def tls_states() -> int:
        return sum(type(one).__name__ == "SSLProtocol" for one in gc.get_objects())

    async with scene_of(replace(ROOMY, connections=2)) as scene:
        gc.collect()
        gc.disable()
        try:
            before = tls_states()
            for _ in range(20):
                junk = await scene.connect(tls=False)
                junk[1].write(b"junk" * 10)
                assert await is_closed(junk)
            silent = [await scene.connect(f"127.0.0.{2 + number}", tls=False) for number in range(20)]
            for displaced in silent[:-2]:
                assert await is_closed(displaced)
            assert tls_states() - before <= 2 + 2  # those that are open, and as many whose end is under way
        finally:
            gc.enable()


def test_strangers_fill_no_log() -> None:
    clock, seldom = [0.0], Seldom(clock=lambda: clock[0])

    def written(text: str) -> str | None:
        record = logging.LogRecord("x", logging.INFO, "", 0, text, (), None)
        return record.getMessage() if seldom.filter(record) else None

    assert [written(text) for text in "abcdefg"] == [*"abcde", None, None]
    clock[0] = 1.0
    assert [written(text) for text in "hi"] == ["h (2 lines before this one were left out)", "i"]


@pytest.mark.parametrize("limits", [REPORTS, METRICS, PROBES])
def test_the_operator_s_ports_have_room_for_others_than_the_worst_address(limits: Limits) -> None:
    assert limits.peer_connections * 4 <= limits.connections
    assert limits.peer_rate * 2 < limits.rate
    assert limits.handshakes < limits.connections


def test_an_address_is_known_for_two_minutes_after_its_job_was_heard() -> None:
    made = tls_port.Listener.__new__(tls_port.Listener)
    protocol: Any = object()
    made._by_protocol, made._open = {protocol: Connection("10.0.0.1", "")}, {}
    made._known, made._loop = {}, cast(Any, SimpleNamespace(time=lambda: 1000.0))
    made.prove(protocol, JOB)
    assert made._known == {"10.0.0.1": ("ns", 1120.0)}
