"""Copies of shards on other nodes' volumes: each node also keeps its neighbor's, so that any one volume may be lost.

A rank sends its shard to the next node once it is durable on its own volume, in the background of the save, and acknowledges when it is
durable there too. A neighbor that can't keep it costs the second copy, never the commit: the manifest names the nodes that
have each shard, and the log says where one copy is all there is.

Shards go from node to node over TCP, one file a connection, proved by HMAC with a token that only this run's ranks know.

    server → client   32 random bytes, the challenge
    client → server   a frame: the request, as JSON, signed
    client → server   the file's bytes
    server → client   a frame: the problem, or null once the file is durable

A frame is its length (4 bytes), JSON, and HMAC-SHA256 over challenge and JSON. The file's SHA-256 stands in a signed frame, so its
bytes need no signature. Nothing is unpickled, no path is taken from the wire, and a transfer holds one chunk in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep_spec.files import durable_file, make_directory
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.layout import is_shard, parse_commit
from lockstep_train.checkpoint.format.manifest import Manifest, ShardRecord
from lockstep_train.report import print_error

CHUNK_BYTES = 1 << 20
CHALLENGE_BYTES = 32
FRAME_BYTES_MAX = 1 << 16
CONNECTIONS_MAX = 64
DEADLINE_SECONDS = 300.0
STRANGER_SECONDS = 10.0
"""Time limit of whoever hasn't proved the token."""


class TransferError(OSError):
    """The other side refused, went away, or sent something else than it promised."""


class Line:
    """Connection between two ranks, with one deadline for everything on it."""

    def __init__(self, connection: socket.socket, token: bytes, deadline_seconds: float) -> None:
        self._connection = connection
        self._token = token
        self.challenge = b""
        self.allow(deadline_seconds)

    def allow(self, seconds: float) -> None:
        """Set the deadline: everything must be over in so many seconds from now on."""
        self._end = time.monotonic() + seconds

    def _wait(self) -> socket.socket:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TransferError("the deadline has passed")
        self._connection.settimeout(left)
        return self._connection

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._wait().recv(min(size, CHUNK_BYTES))
            if not part:
                raise TransferError("the other side closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, content: bytes) -> None:
        self._wait().sendall(content)

    def drain(self) -> None:
        """Read what the other side still sends, until it closes. A connection closed before that is reset, and what was said last is
        lost.
        """
        while self._wait().recv(CHUNK_BYTES):
            pass

    def send(self, role: str, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.write(len(body).to_bytes(4, "big") + body + self._signature(role, body))

    def receive(self, role: str) -> dict[str, Any]:
        """Receive a frame. Raises TransferError unless it was signed for this connection by the other `role`."""
        size = int.from_bytes(self.read(4), "big")
        if size > FRAME_BYTES_MAX:
            raise TransferError("the frame is too long")
        body = self.read(size)
        signature = self._signature(role, body)
        if not hmac.compare_digest(self.read(len(signature)), signature):
            raise TransferError("the signature is wrong: the other side is not of this run")
        value = json.loads(body)
        if not isinstance(value, dict):
            raise TransferError("the frame holds no object")
        return value

    def _signature(self, role: str, body: bytes) -> bytes:
        return hmac.digest(self._token, role.encode() + self.challenge + body, "sha256")

    def send_file(self, path: Path, size: int) -> None:
        with path.open("rb") as file:
            left = size
            while left:
                chunk = file.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise TransferError(f"{path} is shorter than it should be")
                self.write(chunk)
                left -= len(chunk)

    def receive_file(self, path: Path, size: int, sha256: str) -> None:
        """Receive a file: it is durable under its name, or not there."""
        digest = hashlib.sha256()
        with durable_file(path) as file:
            left = size
            while left:
                chunk = self.read(min(left, CHUNK_BYTES))
                digest.update(chunk)
                file.write(chunk)
                left -= len(chunk)
            if digest.hexdigest() != sha256:
                raise TransferError(f"{path.name} arrived with another checksum")


ServerAddress = tuple[str, int]
"""Address at which a node's server listens."""


@dataclass(frozen=True)
class Shard:
    """The file that is meant: `commit` and `file` are names, never paths."""

    commit: str
    file: str
    bytes: int
    sha256: str


class Server:
    """Server of a node: keeps what neighbors put, as files of commits of this attempt."""

    def __init__(self, checkpoints: Path, attempt: int, token: bytes, host: str) -> None:
        self._checkpoints = checkpoints
        self._attempt = attempt
        self._token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self.place: ServerAddress = (host, self._socket.getsockname()[1])
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
        request = line.receive("client")
        line.allow(DEADLINE_SECONDS)
        shard = Shard(request["commit"], request["file"], request["bytes"], request["sha256"])
        name = parse_commit(shard.commit)
        if name is None or not is_shard(shard.file):
            raise TransferError("no such file")
        path = self._checkpoints / str(name) / shard.file
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


def put_shard(place: ServerAddress, token: bytes, shard: Shard, path: Path, deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Send a file, and wait until it is durable on the other node's volume. Raises OSError."""
    with socket.create_connection(place, timeout=min(10.0, deadline_seconds)) as connection:
        line = Line(connection, token, deadline_seconds)
        line.challenge = line.read(CHALLENGE_BYTES)
        line.send("client", asdict(shard))
        line.send_file(path, shard.bytes)
        problem = line.receive("server")["problem"]
        if problem is not None:
            raise TransferError(problem)


def own_address(towards: str, port: int) -> str:
    """This machine's address on the way to another: nothing is sent, the system only chooses a route."""
    family, kind, protocol, _, address = socket.getaddrinfo(towards, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host


class Replicas:
    """Way of this rank to the other nodes' volumes; the node's first rank serves them. One copy where nothing is shared, or all is."""

    def __init__(self, ranks: Ranks, copies: int, token: bytes, places: list[ServerAddress]) -> None:
        self._ranks = ranks
        self._copies = copies
        self._token = token
        self._places = places

    def copy(self, folder: Path, shard: ShardRecord) -> ShardRecord:
        """Put a shard that is durable here on the neighbors' volumes; the record says who has it."""
        nodes = [self._ranks.node]
        for distance in range(1, self._copies):
            node = (self._ranks.node + distance) % self._ranks.nodes
            try:
                put_shard(self._places[node], self._token, _named(folder.name, shard), folder / shard.file)
                nodes.append(node)
            except OSError as error:
                print_error(f"lockstep_train: rank {self._ranks.rank}: node {node} can't keep a copy of {folder / shard.file}: {error}")
        return replace(shard, nodes=tuple(nodes))

    def lacking(self, manifest: Manifest) -> list[str]:
        """Shards with fewer copies than asked for."""
        return [shard.file for shard in manifest.shards if len(shard.nodes) < self._copies]


def _named(commit: str, shard: ShardRecord) -> Shard:
    return Shard(commit, shard.file, shard.bytes, shard.sha256)


def local_only(ranks: Ranks) -> Replicas:
    """Return replicas for one volume: nothing travels."""
    return Replicas(ranks, 1, b"", [])


def connect(ranks: Ranks, checkpoints: Path, attempt: int, copies: int, master: tuple[str, int]) -> Replicas:
    """Start this node's server, which serves until the process ends, and learn of the others'. `master`: where rank 0 is reached, to choose
    the address others see.
    """
    token = bytes.fromhex(ranks.publish("replicas/token", secrets.token_hex(32) if ranks.first else None))
    server = Server(checkpoints, attempt, token, own_address(*master)) if ranks.first_of_node else None
    mine = [ranks.node, *server.place] if server is not None else None
    answers = ranks.gather("replicas/place", mine)
    listed = ranks.publish("replicas/places", sorted(answer for answer in answers or [] if answer is not None))
    return Replicas(ranks, min(copies, ranks.nodes), token, [(host, port) for _, host, port in listed])
