"""Shards from node to node: whole and durable, or not there; and only among this run's ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_machine import wire as protocol
from lockstep_machine.wire import Gone, Wire
from lockstep_spec.handshake import Handshake
from lockstep_train.checkpoint.save import replicas
from lockstep_train.checkpoint.save.replicas import (
    PURPOSE,
    Server,
    Shard,
    TransferError,
    proved_wire,
    put_shard,
    send_file,
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
        (shard(), b"x" * 32, "not of this run|broke|reset|broken pipe"),
        (shard(commit="step-10.a2"), SECRET, "^it is of another attempt$"),
        (shard(commit="../../step-10.a3"), SECRET, "broke|reset|broken pipe"),
        (shard(file="../shard-r00000-of-00002.safetensors"), SECRET, "broke|reset|broken pipe"),
        (shard(file="manifest.json"), SECRET, "broke|reset|broken pipe"),
        (shard(content=CONTENT[:-1] + b"x"), SECRET, "broke|reset|broken pipe"),
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
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TransferError, match="nothing heard"):
        put_shard(("127.0.0.1", silent.getsockname()[1]), SECRET, shard(), path, deadline_seconds=0.05)


def wire_of(connection: socket.socket) -> Wire:
    return Wire(connection.fileno(), connection.fileno(), 5)


def test_a_server_of_another_run_cannot_pretend_that_it_kept_a_shard(path: Path) -> None:
    """It answers each line as one who knows another secret, and gets nothing of the shard."""
    got = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend() -> None:
            connection, _ = listening.accept()
            with connection:
                wire, shake = wire_of(connection), Handshake(b"x" * 32, PURPOSE, 0, "c", "c")
                wire.say({"nonce": "c"})
                wire.hear()
                wire.say({"proof": shake.coordinator_proof()})
                wire.say({"counter": 1, "message": {"problem": None}, "signature": ""})
                connection.settimeout(5)
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
    write = Wire._write
    monkeypatch.setattr(Wire, "_write", lambda wire, data: (said.append(wire._unsent + data), write(wire, data)))
    put_shard(server.place, SECRET, shard(), path)
    monkeypatch.setattr(Wire, "_write", write)
    (tmp_path / "there" / "step-10.a3" / FILE).unlink()
    proof = next(content for content in said if b"proof" in content and b"nonce" in content)
    request = next(content for content in said if b"sha256" in content)
    with socket.create_connection(server.place) as connection:
        wire = wire_of(connection)
        wire.hear()
        with pytest.raises(Gone):
            wire._write(proof + request)
            wire.hear()
    assert files(tmp_path / "there") == []


@pytest.mark.parametrize("answer", [{}, {"nonce": "n"}, {"nonce": None, "proof": None}, {"nonce": "n", "proof": "0" * 64}])
def test_a_stranger_is_hung_up_on_and_no_file_of_it_is_kept(server: Server, tmp_path: Path, answer: dict[str, object]) -> None:
    with socket.create_connection(server.place) as connection:
        wire = wire_of(connection)
        wire.hear()
        wire.say(answer)
        with pytest.raises(Gone):
            wire.say({"counter": 1, "message": {"commit": "step-10.a3", "file": FILE, "bytes": 0, "sha256": ""}, "signature": "0" * 64})
            wire.hear()
    assert files(tmp_path) == []


def test_a_file_is_sent_one_mebibyte_at_a_time(path: Path) -> None:
    sizes: list[int] = []
    send_file(cast(Any, SimpleNamespace(pass_on=lambda chunk: sizes.append(len(chunk)))), path)
    assert sizes == [1 << 20, 1 << 20, len(CONTENT) - (2 << 20), 0]


@pytest.mark.parametrize("content", [CONTENT + b"more", CONTENT[:-1]], ids=["more", "less"])
def test_a_file_of_another_size_than_was_promised_is_not_kept(server: Server, path: Path, tmp_path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(TransferError):
        put_shard(server.place, SECRET, shard(), path)
    assert files(tmp_path / "there") == []


def test_a_stranger_is_listened_to_for_ten_seconds_and_a_server_of_this_run_for_five_minutes(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock(0.0)
    trickle = SimpleNamespace(read=lambda *_: b"\0", write=lambda _, data: len(data), set_blocking=os.set_blocking)
    monkeypatch.setattr(protocol, "time", clock)
    monkeypatch.setattr(protocol, "os", trickle)
    monkeypatch.setattr(protocol, "_ready", lambda *_: clock.sleep(5) or True)  # (a zero comes every five seconds)
    with socket.create_server(("127.0.0.1", 0)) as other:
        with socket.create_connection(other.getsockname()) as connection, pytest.raises(Gone, match="the deadline has passed"):
            server._meet(connection)
        assert clock.now == 10
        clock.now = 0.0
        with pytest.raises(TransferError, match="the deadline has passed"):
            put_shard(other.getsockname(), SECRET, shard(), path)
        assert clock.now == 300


def test_of_65_strangers_the_oldest_is_hung_up_on_and_a_rank_in_the_middle_of_its_shard_is_not(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "STRANGER_SECONDS", 3600.0)
    with contextlib.ExitStack() as stack:

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(server.place, 30))

        rank = connected()
        wire = proved_wire(rank, SECRET, 30, listened=False)
        strangers = [connected() for _ in range(65)]
        assert all(stranger.recv(1) for stranger in strangers[1:])
        while strangers[0].recv(1 << 16):
            pass
        wire.say(asdict(shard()))
        send_file(wire, path)
        assert wire.hear() == {"problem": None}
