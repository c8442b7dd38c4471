"""Shards from node to node: whole and durable, or not there; and only among this run's ranks."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_train.checkpoint.save import replicas
from lockstep_train.checkpoint.save.replicas import (
    CHALLENGE_BYTES,
    Line,
    Server,
    Shard,
    TransferError,
    put_shard,
)
from unit.virtual_time import VirtualClock

TOKEN = b"t" * 32
CONTENT = bytes(range(256)) * 9000  # more than two chunks
FILE = "shard-r00000-of-00002.safetensors"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "there", 3, TOKEN, "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / FILE
    path.write_bytes(CONTENT)
    return path


def shard(commit: str = "step-10.a3", file: str = FILE, content: bytes = CONTENT) -> Shard:
    return Shard(commit, file, len(content), hashlib.sha256(content).hexdigest())


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_shard_that_was_put_is_there(server: Server, path: Path, tmp_path: Path) -> None:
    put_shard(server.place, TOKEN, shard(), path)
    assert (tmp_path / "there" / "step-10.a3" / FILE).read_bytes() == CONTENT
    assert files(tmp_path / "there") == [f"step-10.a3/{FILE}"]


@pytest.mark.parametrize(
    ("asked", "token", "told"),
    [
        (shard(), b"x" * 32, "closed|reset|broken pipe"),
        (shard(commit="step-10.a2"), TOKEN, "^it is of another attempt$"),
        (shard(commit="../../step-10.a3"), TOKEN, "closed|reset|broken pipe"),
        (shard(file="../shard-r00000-of-00002.safetensors"), TOKEN, "closed|reset|broken pipe"),
        (shard(file="manifest.json"), TOKEN, "closed|reset|broken pipe"),
        (shard(content=CONTENT[:-1] + b"x"), TOKEN, "closed|reset|broken pipe"),
    ],
)
def test_what_is_not_a_shard_of_this_attempt_from_a_rank_of_this_run_is_not_kept(
    server: Server, path: Path, tmp_path: Path, asked: Shard, token: bytes, told: str
) -> None:
    with pytest.raises(OSError, match=f"(?i){told}"):
        put_shard(server.place, token, asked, path)
    put_shard(server.place, TOKEN, shard(commit="step-11.a3"), path)  # it still serves
    assert files(tmp_path / "there") == [f"step-11.a3/{FILE}"]


def test_a_full_volume_is_told_to_the_sender(server: Server, path: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "step-10.a3").write_text("in the way")
    with pytest.raises(TransferError, match="can't be written"):
        put_shard(server.place, TOKEN, shard(content=CONTENT[:9]), path)


def test_a_server_that_says_nothing_costs_no_more_than_the_deadline(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="timed out"):
        put_shard(("127.0.0.1", silent.getsockname()[1]), TOKEN, shard(), path, deadline_seconds=0.05)


def test_a_server_of_another_run_cannot_pretend_that_it_kept_a_shard(path: Path) -> None:
    """It reads everything and signs its answer with a token of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            connection, _ = listening.accept()
            with connection:
                line = Line(connection, b"x" * 32, 5)
                line.challenge = b"c" * 32
                line.write(line.challenge)
                size = int.from_bytes(line.read(4), "big")
                line.read(size + 32 + len(CONTENT))
                line.send("server", {"problem": None})

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(TransferError, match="not of this run"):
            put_shard(("127.0.0.1", listening.getsockname()[1]), TOKEN, shard(), path, deadline_seconds=5)
        thread.join()


def test_a_signature_counts_on_one_connection_only(server: Server, path: Path, tmp_path: Path) -> None:
    """What was heard of a put is replayed on a new connection, whose challenge is another one."""
    heard: list[bytes] = []
    write = Line.write

    class Heard(Line):
        def write(self, content: bytes) -> None:
            heard.append(content)
            write(self, content)

    with socket.create_connection(server.place) as connection:
        line = Heard(connection, TOKEN, 5)
        line.challenge = line.read(CHALLENGE_BYTES)
        line.send("client", {"commit": "step-1.a3", "file": FILE, "bytes": 1, "sha256": ""})
    with socket.create_connection(server.place) as connection:
        line = Line(connection, TOKEN, 5)
        line.challenge = line.read(CHALLENGE_BYTES)
        line.write(heard[0])
        with pytest.raises(OSError, match=r"closed|reset|broken pipe"):
            line.receive("server")


def test_a_stranger_s_frame_is_refused_before_more_than_its_length_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours, TOKEN, 10.0)
        for size, told in ((64 << 10, "signature"), ((64 << 10) + 1, "too long")):
            thread = threading.Thread(
                target=theirs.sendall, args=(size.to_bytes(4, "big") + b"x" * (size + 32 if told == "signature" else 0),)
            )
            thread.start()
            with pytest.raises(TransferError, match=told):
                line.receive("asks")
            thread.join()


def test_a_file_is_sent_one_mebibyte_at_a_time(path: Path) -> None:
    sizes: list[int] = []
    connection = SimpleNamespace(settimeout=lambda _: None, sendall=lambda content: sizes.append(len(content)))
    Line(cast(Any, connection), TOKEN, 60).send_file(path, len(CONTENT))
    assert sizes == [1 << 20, 1 << 20, len(CONTENT) - (2 << 20)]


class Trickle:
    """A connection on which a zero comes every five seconds."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def __enter__(self) -> Trickle:
        return self

    def __exit__(self, *_: object) -> None: ...
    def settimeout(self, seconds: float) -> None: ...
    def sendall(self, content: bytes) -> None: ...
    def recv(self, size: int) -> bytes:
        self._clock.sleep(5)
        return b"\0"


def test_a_stranger_is_listened_to_for_ten_seconds_and_a_server_of_this_run_for_five_minutes(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock(0.0)
    monkeypatch.setattr(replicas, "time", clock)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: Trickle(clock))
    assert server._slots.acquire(blocking=False)
    server._serve(cast(Any, Trickle(clock)))
    assert clock.now == 10
    clock.now = 0.0
    with pytest.raises(TransferError, match="the deadline has passed"):
        put_shard(server.place, TOKEN, shard(), path)
    assert clock.now == 300


def test_of_65_connections_at_once_the_last_is_refused(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(server.place, 30)) for _ in range(65)]
        assert [len(connection.recv(32)) for connection in connections] == [32] * 64 + [0]
