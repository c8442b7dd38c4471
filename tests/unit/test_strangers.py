"""A stranger on every port that Lockstep opens between machines and on loopback: it has no key, says what it likes, and gets nothing.

The ports of the operator are played in platforms/operator, the values of the ranks' store in train/test_store.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.platforms.inpod.carry import Stored
from lockstep.platforms.inpod.entries import hear_entries
from lockstep.platforms.inpod.gate import Gate, GuardServer
from lockstep.platforms.local.joined import channel as launch
from lockstep.platforms.local.joined.token import new_token
from lockstep.platforms.onhost.station import give_on, listening, proved_wire
from lockstep_gang.agent.preflight.network import ProbePort, why_unreachable
from lockstep_gang.agent.ranks.progress_server import ProgressServer
from lockstep_gang.contract import channel
from lockstep_spec.codec import ContractError
from lockstep_train.checkpoint.save.replicas import Server, Shard, put_shard
from unit.gang.cases import KEY, make_run
from unit.platforms.operator.test_report_server import PATH, served

SECRET, FILE = b"s" * 32, "shard-r00000-of-00002.safetensors"
Friend = Callable[[], None]
Door = tuple[int, Friend]
"""Port, and what one who has the key does there: it raises where it gets nothing."""
SILENT = 70
"""Strangers who say nothing while a friend comes."""
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
"""Beginning of a TLS connection."""
WORDS = {
    "nothing": b"",
    "an empty line": b"\n\n",
    "a page": b"GET /?token=x HTTP/1.1\r\nHost: lockstep-test.localhost:1\r\nCookie: lockstep-test=x\r\n\r\n",
    "a page of another name": b"GET /?token=a-token HTTP/1.1\r\nHost: localhost:1\r\n\r\n",
    "a report": b"POST / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer x\r\nContent-Length: 2\r\n\r\n{}",
    "TLS": HELLO,
    "no text": b"\xff\xfe" * 100 + b"\n",
    "no object": b"[1]\n",
    "an empty proof": b'{"node": 0, "nonce": "", "proof": ""}\n' * 2,
    "a wrong proof": b'{"node": 0, "nonce": "' + b"0" * 32 + b'", "proof": "' + b"0" * 64 + b'"}\n' * 2,
    "proofs of other kinds": b'{"node": true, "nonce": [], "proof": {}}\n' * 2,
    "a message at once": b'{"counter": 1, "message": {"commit": "step-1.a1"}, "signature": "' + b"0" * 64 + b'"}\n' * 2,
    "brackets": b"[" * 6000 + b"\n",
    "a line without end": b"x" * (1 << 18),
}


@contextmanager
def looping(door: Callable[[], Any]) -> Iterator[Door]:
    """A door of asyncio's, in a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    context = door()
    port, friend = run(context.__aenter__())
    try:
        yield port, lambda: run(friend())
    finally:
        run(context.__aexit__(None, None, None))
        run(_end_all())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@asynccontextmanager
async def coordinator() -> AsyncIterator[Any]:
    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ContractError, EOFError, OSError):
            _, proven = await channel.accept((reader, writer), KEY, "uid", 2)
            proven.send({"order": "start"})

    async def friend() -> None:
        proven = await channel.connect(("127.0.0.1", port), KEY, "uid", 1)
        assert await proven.receive() == {"order": "start"}
        proven.close()

    async with await channel.listen(taken, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield port, friend


@asynccontextmanager
async def preflight() -> AsyncIterator[Any]:
    run = make_run(nodes=2, addresses=("127.0.0.1", "127.0.0.1"))
    door = ProbePort(run, KEY, 0)
    port = await door.open()

    async def friend() -> None:
        assert await why_unreachable(run, KEY, 1, 0, port) == ""

    yield port, friend
    door.close()


@asynccontextmanager
async def launching() -> AsyncIterator[Any]:
    token = new_token()

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ContractError, EOFError, OSError):
            (await launch.accept((reader, writer), token)).send({"kind": "welcome"})

    async def friend() -> None:
        proven = await launch.connect(("127.0.0.1", port), token)
        assert (await proven.receive())["kind"] == "welcome"
        proven.close()

    async with await channel.listen(taken, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield port, friend


@asynccontextmanager
async def progress(folder: Path) -> AsyncIterator[Any]:
    steps: list[object] = []
    server = ProgressServer(folder, steps.append, lambda _: None)
    variables = await server.start()
    address = next(value for value in variables.values() if value.startswith("http"))
    port, token = int(address.split(":")[2].rstrip("/")), (folder / "progress-token").read_text()

    async def friend() -> None:
        assert steps == []
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST / HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()

    yield port, friend
    server.close()


@contextmanager
def copying() -> Iterator[Door]:
    """The port of a host that gives files to others; its thread ends with this process."""
    listener, _ = listening("127.0.0.1", [0])
    assert listener is not None
    entries = [{"name": "", "dir": True}]
    threading.Thread(target=give_on, args=(listener, SECRET, Stored(entries, "x")), daemon=True).start()

    def friend() -> None:
        with socket.create_connection(listener.getsockname(), 60) as connection:
            assert hear_entries(proved_wire(connection, SECRET, gives=False)) == (entries, "x")

    yield listener.getsockname()[1], friend


@contextmanager
def replicas(folder: Path) -> Iterator[Door]:
    server, source = Server(folder / "there", 1, SECRET, "127.0.0.1"), folder / "source"
    source.write_bytes(b"weights")

    def friend() -> None:
        assert not (folder / "there").exists() or [path.name for path in (folder / "there").rglob("*") if path.is_file()] == [FILE]
        put_shard(server.place, SECRET, Shard("step-1.a1", FILE, 7, hashlib.sha256(b"weights").hexdigest()), source)
        assert (folder / "there" / "step-1.a1" / FILE).read_bytes() == b"weights"

    yield server.place[1], friend
    server.close()


@contextmanager
def editor() -> Iterator[Door]:
    with GuardServer(0, Gate("a-token", "vscode", "lockstep-test.localhost"), "/nonexistent") as guard:
        guard.server_activate()
        thread = threading.Thread(target=guard.serve_forever)
        thread.start()
        port = guard.server_address[1]

        def friend() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/?token=a-token", headers={"Host": f"lockstep-test.localhost:{port}"})
            assert connection.getresponse().status == 302
            connection.close()

        try:
            yield port, friend
        finally:
            guard.shutdown()
            thread.join()


DOORS: dict[str, Callable[[Path], AbstractContextManager[Door]]] = {
    "coordinator": lambda _: looping(coordinator),
    "preflight": lambda _: looping(preflight),
    "launch": lambda _: looping(launching),
    "progress of ranks": lambda folder: looping(lambda: progress(folder)),
    "copies from host to host": lambda _: copying(),
    "copies of shards": replicas,
    "editor": lambda _: editor(),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_stranger_gets_nothing_changes_nothing_and_keeps_nobody_out(name: str, tmp_path: Path) -> None:
    with DOORS[name](tmp_path) as (port, friend), contextlib.ExitStack() as silent:
        for what, words in WORDS.items():
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(words)
                with contextlib.suppress(OSError):  # it has hung up already
                    connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda connection=connection: connection.recv(1 << 16), b""))
                assert len(answer) < 1000 and not _proves(answer), (what, answer)
        for _ in range(SILENT):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        friend()


def _proves(answer: bytes) -> bool:
    """Return True if an answer has more than a challenge and a refusal."""
    lines = [json.loads(line) for line in answer.splitlines() if line.startswith(b"{")]
    return any(line.keys() & {"proof", "message", "token"} for line in lines) or answer[8:12] in (b" 200", b" 101", b" 302")


async def test_a_stranger_s_report_is_refused_before_it_is_read() -> None:
    async with served() as scene:
        for headers in ({}, {"Authorization": "Bearer "}, {"X-Lockstep-Job": "ns/x/job-uid", "X-Lockstep-Signature": "0" * 64}):
            async with scene.connection.post(PATH, data=b"{}", headers=headers) as reply:
                assert reply.status in (401, 403, 404) and "job-uid" not in await reply.text()
        assert scene.heard == []
