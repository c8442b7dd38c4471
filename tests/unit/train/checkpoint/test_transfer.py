"""Shards from node to node: whole and durable, or not there; and only among this run's ranks."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_spec.handshake import Handshake
from lockstep_train.checkpoint.save import replicas
from lockstep_train.checkpoint.save.replicas import (
    LINE_BYTES_MAX,
    PURPOSE,
    Line,
    Server,
    Shard,
    TransferError,
    put_shard,
)
from unit.virtual_time import VirtualClock

SECRET = b"t" * 32
CONTENT = bytes(range(256)) * 9000  # more than two chunks
FILE = "shard-r00000-of-00002.safetensors"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "there", 3, SECRET, "127.0.0.1")
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
    put_shard(server.place, SECRET, shard(), path)
    assert (tmp_path / "there" / "step-10.a3" / FILE).read_bytes() == CONTENT
    assert files(tmp_path / "there") == [f"step-10.a3/{FILE}"]


@pytest.mark.parametrize(
    ("asked", "secret", "told"),
    [
        (shard(), b"x" * 32, "not of this run|closed|reset|broken pipe"),
        (shard(commit="step-10.a2"), SECRET, "^it is of another attempt$"),
        (shard(commit="../../step-10.a3"), SECRET, "closed|reset|broken pipe"),
        (shard(file="../shard-r00000-of-00002.safetensors"), SECRET, "closed|reset|broken pipe"),
        (shard(file="manifest.json"), SECRET, "closed|reset|broken pipe"),
        (shard(content=CONTENT[:-1] + b"x"), SECRET, "closed|reset|broken pipe"),
    ],
)
def test_what_is_not_a_shard_of_this_attempt_from_a_rank_of_this_run_is_not_kept(
    server: Server, path: Path, tmp_path: Path, asked: Shard, secret: bytes, told: str
) -> None:
    with pytest.raises(OSError, match=f"(?i){told}"):
        put_shard(server.place, secret, asked, path)
    put_shard(server.place, SECRET, shard(commit="step-11.a3"), path)  # it still serves
    assert files(tmp_path / "there") == [f"step-11.a3/{FILE}"]


def test_a_full_volume_is_told_to_the_sender(server: Server, path: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "step-10.a3").write_text("in the way")
    with pytest.raises(TransferError, match="can't be written"):
        put_shard(server.place, SECRET, shard(content=CONTENT[:9]), path)


def test_a_server_that_says_nothing_costs_no_more_than_the_deadline(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError, match="timed out"):
        put_shard(("127.0.0.1", silent.getsockname()[1]), SECRET, shard(), path, deadline_seconds=0.05)


def test_a_server_of_another_run_cannot_pretend_that_it_kept_a_shard(path: Path) -> None:
    """It answers each line as one who knows another secret, and gets nothing of the shard."""
    got = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            connection, _ = listening.accept()
            with connection:
                line, shake = Line(connection, 5), Handshake(b"x" * 32, PURPOSE, 0, "c", "c")
                line._say({"nonce": "c"})
                line._hear()
                line._say({"proof": shake.coordinator_proof()})
                line._say({"counter": 1, "message": {"problem": None}, "signature": ""})
                with contextlib.suppress(OSError):
                    while data := connection.recv(1 << 16):
                        got.extend(data)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(TransferError, match="not of this run"):
            put_shard(("127.0.0.1", listening.getsockname()[1]), SECRET, shard(), path, deadline_seconds=5)
        thread.join()
    assert got == b""


def test_what_was_heard_of_a_put_opens_no_other_connection(
    server: Server, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bytes] = []
    write = Line.write
    monkeypatch.setattr(Line, "write", lambda line, content: (said.append(content), write(line, content)))
    put_shard(server.place, SECRET, shard(), path)
    monkeypatch.setattr(Line, "write", write)
    (tmp_path / "there" / "step-10.a3" / FILE).unlink()
    proof = next(content for content in said if b"proof" in content and b"nonce" in content)
    request = next(content for content in said if b"sha256" in content)
    with socket.create_connection(server.place) as connection:
        line = Line(connection, 5)
        line._hear()
        with pytest.raises(OSError, match=r"closed|reset|broken pipe"):
            line.write(proof + request + CONTENT)
            line.drain()
            raise TransferError("closed")
    assert files(tmp_path / "there") == []


@pytest.mark.parametrize("answer", [{}, {"nonce": "n"}, {"nonce": None, "proof": None}, {"nonce": "n", "proof": "0" * 64}])
def test_a_stranger_is_hung_up_on_and_no_file_of_it_is_kept(server: Server, tmp_path: Path, answer: dict[str, object]) -> None:
    with socket.create_connection(server.place) as connection:
        line = Line(connection, 5)
        line._hear()
        line._say(answer)
        line._say({"counter": 1, "message": {"commit": "step-10.a3", "file": FILE, "bytes": 0, "sha256": ""}, "signature": "0" * 64})
        with pytest.raises(OSError, match=r"closed|reset|broken pipe"):
            line._hear()
    assert files(tmp_path) == []


def test_a_stranger_s_line_has_an_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=theirs.sendall, args=(b"x" * (LINE_BYTES_MAX + 1),))
        thread.start()
        with pytest.raises(TransferError, match="too long"):
            Line(ours, 10.0)._hear()
        thread.join()


def test_a_file_is_sent_one_mebibyte_at_a_time(path: Path) -> None:
    sizes: list[int] = []
    connection = SimpleNamespace(settimeout=lambda _: None, sendall=lambda content: sizes.append(len(content)))
    Line(cast(Any, connection), 60).send_file(path, len(CONTENT))
    assert sizes == [1 << 20, 1 << 20, len(CONTENT) - (2 << 20)]


class Trickle:
    """A connection on which a zero comes every five seconds."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def __enter__(self) -> Trickle:
        return self

    def __exit__(self, *_: object) -> None: ...
    def settimeout(self, seconds: float) -> None: ...
    def setsockopt(self, *_: int) -> None: ...
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
    server._serve(cast(Any, Trickle(clock)))
    assert clock.now == 10
    clock.now = 0.0
    with pytest.raises(TransferError, match="the deadline has passed"):
        put_shard(server.place, SECRET, shard(), path)
    assert clock.now == 300


def test_of_65_strangers_the_oldest_is_hung_up_on_and_a_rank_in_the_middle_of_its_shard_is_not(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "STRANGER_SECONDS", 3600.0)
    with contextlib.ExitStack() as stack:

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(server.place, 30))

        rank = connected()
        line = Line(rank, 30)
        line.prove(SECRET, listened=False)
        strangers = [connected() for _ in range(65)]
        assert all(stranger.recv(1) for stranger in strangers[1:])
        while strangers[0].recv(1 << 16):
            pass
        line.send(asdict(shard()))
        line.write(CONTENT)
        assert line.receive() == {"problem": None}
