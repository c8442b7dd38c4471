"""Shards from node to node, over TCP: a put or a get of one file, proved by HMAC with a token that only this run's ranks know.

    server → client   32 random bytes, the challenge
    client → server   a frame: what is asked, as JSON, signed
    put               the file's bytes, then the server's frame: the problem, or null once the file is durable
    get               the server's frame, then the file's bytes

A frame is its length (4 bytes), JSON, and HMAC-SHA256 over challenge and JSON. The file's SHA-256 stands in a signed frame, so its
bytes need no signature. Nothing is unpickled, no path is taken from the wire, and a transfer holds one chunk in memory.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep_train.base.durable import make_directory
from lockstep_train.checkpoint.format.layout import is_shard, parse_commit
from lockstep_train.checkpoint.save.line import CHALLENGE_BYTES, Line, TransferError

CONNECTIONS_MAX = 64
DEADLINE_SECONDS = 300.0
STRANGER_SECONDS = 10.0
"""For whoever hasn't proved the token."""


@dataclass(frozen=True)
class Place:
    """Where a node's server listens."""

    host: str
    port: int


@dataclass(frozen=True)
class Shard:
    """The file that is meant: `commit` and `file` are names, never paths."""

    commit: str
    file: str
    bytes: int
    sha256: str


class Server:
    """A node's end: keeps what neighbours put, as files of commits of this attempt, and gives what it has."""

    def __init__(self, checkpoints: Path, attempt: int, token: bytes, host: str) -> None:
        self._checkpoints = checkpoints
        self._attempt = attempt
        self._token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self.place = Place(host, self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="lockstep-replicas", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; closing alone doesn't
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="lockstep-replica", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._answer(Line(connection, self._token, STRANGER_SECONDS))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the client knows, and says it
        finally:
            self._slots.release()

    def _answer(self, line: Line) -> None:
        line.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        line.write(line.challenge)
        asked = line.receive("client")
        line.allow(DEADLINE_SECONDS)
        shard = Shard(asked["commit"], asked["file"], asked["bytes"], asked["sha256"])
        name = parse_commit(shard.commit)
        if name is None or not is_shard(shard.file):
            raise TransferError("no such file")
        path = self._checkpoints / str(name) / shard.file
        if asked["do"] == "get":
            line.send("server", {"problem": None if path.is_file() else f"{path} is not there"})
            line.send_file(path, shard.bytes)
        elif asked["do"] == "put":
            problem = self._keep(line, path, shard) if name.attempt == self._attempt else "it is of another attempt"
            line.send("server", {"problem": problem})
            if problem is not None:
                line.drain()

    def _keep(self, line: Line, path: Path, shard: Shard) -> str | None:
        try:
            make_directory(path.parent)
            line.receive_file(path, shard.bytes, shard.sha256)
        except TransferError:
            raise
        except OSError as error:
            return f"{path} can't be written: {error.strerror}"
        return None


def _ask(place: Place, token: bytes, shard: Shard, do: str, then: Callable[[Line], None], deadline_seconds: float) -> None:
    with socket.create_connection((place.host, place.port), timeout=min(10.0, deadline_seconds)) as connection:
        line = Line(connection, token, deadline_seconds)
        line.challenge = line.read(CHALLENGE_BYTES)
        line.send("client", {"do": do, "commit": shard.commit, "file": shard.file, "bytes": shard.bytes, "sha256": shard.sha256})
        then(line)


def _agree(line: Line) -> None:
    problem = line.receive("server")["problem"]
    if problem is not None:
        raise TransferError(problem)


def put(place: Place, token: bytes, shard: Shard, path: Path, deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Returns when the file is durable on the other node's volume. Raises OSError."""

    def send(line: Line) -> None:
        line.send_file(path, shard.bytes)
        _agree(line)

    _ask(place, token, shard, "put", send, deadline_seconds)


def get(place: Place, token: bytes, shard: Shard, path: Path, deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """The file from another node's volume, checked against its SHA-256, as `path`. Raises OSError."""

    def take(line: Line) -> None:
        _agree(line)
        line.receive_file(path, shard.bytes, shard.sha256)

    _ask(place, token, shard, "get", take, deadline_seconds)


def own_address(towards: str, port: int) -> str:
    """This machine's address on the way to another: nothing is sent, the system only chooses a route."""
    family, kind, protocol, _, address = socket.getaddrinfo(towards, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host
