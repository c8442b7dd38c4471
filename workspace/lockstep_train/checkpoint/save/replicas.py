"""Copies of shards on other nodes' volumes: each node also keeps its neighbor's, so that any one volume may be lost.

A rank sends its shard to the next node once it is durable on its own volume, in the background of the save, and acknowledges when it is
durable there too. A neighbor that can't keep it costs the second copy, never the commit: the manifest names the nodes that
have each shard, and the log says where one copy is all there is.

Shards go from node to node over TCP, one file a connection, on which both ends first prove the run's secret (`handshake.prove`).

    client → server   the request, a signed line
    client → server   the file's bytes
    server → client   the problem, or null once the file is durable: a signed line

The file's SHA-256 stands in a signed line, so its bytes need no signature. They are not encrypted. Nothing is unpickled, no path is taken
from the wire, and a transfer holds one chunk in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep_spec.codec import ContractError
from lockstep_spec.files import durable_file, make_directory
from lockstep_spec.handshake import Strangers, prove, read_object
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.layout import is_shard, parse_commit
from lockstep_train.checkpoint.format.manifest import Manifest, ShardRecord
from lockstep_train.report import print_error

CHUNK_BYTES = 1 << 20
LINE_BYTES_MAX = 1 << 16
PURPOSE = "lockstep-replicas/1"
DEADLINE_SECONDS = 300.0
STRANGER_SECONDS = 10.0
"""Time limit of whoever hasn't proved the secret."""


class TransferError(OSError):
    """The other side refused, went away, or sent something else than it promised."""


class Line:
    """Connection between two ranks, with one deadline for everything on it."""

    def __init__(self, connection: socket.socket, deadline_seconds: float) -> None:
        self._connection = connection
        self._rest = b""
        """Bytes that came behind a line."""
        self.allow(deadline_seconds)

    def allow(self, seconds: float) -> None:
        """Set the deadline: everything must be over in so many seconds from now on."""
        self._end = time.monotonic() + seconds

    def prove(self, secret: bytes, *, listened: bool) -> None:
        """Prove the run's secret, and have it proved. Raises ContractError, OSError."""
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sealer, self._opener = prove(self._say, self._hear, secret, PURPOSE, listened=listened)

    def send(self, value: dict[str, Any]) -> None:
        self.write(self._sealer.seal(value))

    def receive(self) -> dict[str, Any]:
        """Receive what the other side has signed. Raises ContractError, OSError."""
        return self._opener.open(self._line())

    def _say(self, value: dict[str, Any]) -> None:
        self.write(json.dumps(value).encode() + b"\n")

    def _hear(self) -> dict[str, Any]:
        return read_object(self._line())

    def _line(self) -> bytes:
        while b"\n" not in self._rest:
            if len(self._rest) > LINE_BYTES_MAX:
                raise TransferError("the line is too long")
            self._rest += self._received(LINE_BYTES_MAX)
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _wait(self) -> socket.socket:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TransferError("the deadline has passed")
        self._connection.settimeout(left)
        return self._connection

    def _received(self, size: int) -> bytes:
        """The next bytes from the other side, as many as have come, and `size` at most."""
        part = self._wait().recv(size)
        if not part:
            raise TransferError("the other side closed the connection")
        return part

    def write(self, content: bytes) -> None:
        self._wait().sendall(content)

    def drain(self) -> None:
        """Read what the other side still sends, until it closes. A connection closed before that is reset, and what was said last is
        lost.
        """
        while self._wait().recv(CHUNK_BYTES):
            pass

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
                chunk, self._rest = self._rest[:left] or self._received(min(left, CHUNK_BYTES)), self._rest[left:]
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

    def __init__(self, checkpoints: Path, attempt: int, secret: bytes, host: str) -> None:
        self._checkpoints = checkpoints
        self._attempt = attempt
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._strangers = Strangers()
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
            self._strangers.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="lockstep-replica", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._answer(connection)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the client knows, and says it
        finally:
            self._strangers.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        line = Line(connection, STRANGER_SECONDS)
        line.prove(self._secret, listened=True)
        self._strangers.discard(connection)
        line.allow(DEADLINE_SECONDS)
        request = line.receive()
        shard = Shard(request["commit"], request["file"], request["bytes"], request["sha256"])
        name = parse_commit(shard.commit)
        if name is None or not is_shard(shard.file):
            raise TransferError("no such file")
        path = self._checkpoints / str(name) / shard.file
        problem = self._keep(line, path, shard) if name.attempt == self._attempt else "it is of another attempt"
        line.send({"problem": problem})
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


def put_shard(place: ServerAddress, secret: bytes, shard: Shard, path: Path, deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Send a file, and wait until it is durable on the other node's volume. Raises OSError."""
    with socket.create_connection(place, timeout=min(10.0, deadline_seconds)) as connection:
        line = Line(connection, deadline_seconds)
        try:
            line.prove(secret, listened=False)
            line.send(asdict(shard))
            line.send_file(path, shard.bytes)
            problem = line.receive()["problem"]
        except ContractError as error:
            raise TransferError(f"the other side is not of this run: {error}") from None
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

    def __init__(self, ranks: Ranks, copies: int, places: list[ServerAddress]) -> None:
        self._ranks = ranks
        self._copies = copies
        self._places = places

    def copy(self, folder: Path, shard: ShardRecord) -> ShardRecord:
        """Put a shard that is durable here on the neighbors' volumes; the record says who has it."""
        nodes = [self._ranks.node]
        for distance in range(1, self._copies):
            node = (self._ranks.node + distance) % self._ranks.nodes
            try:
                put_shard(self._places[node], self._ranks.secret, _named(folder.name, shard), folder / shard.file)
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
    return Replicas(ranks, 1, [])


def connect(ranks: Ranks, checkpoints: Path, attempt: int, copies: int, master: tuple[str, int]) -> Replicas:
    """Start this node's server, which serves until the process ends, and learn of the others'. `master`: where rank 0 is reached, to choose
    the address others see.
    """
    server = Server(checkpoints, attempt, ranks.secret, own_address(*master)) if ranks.first_of_node else None
    mine = [ranks.node, *server.place] if server is not None else None
    answers = ranks.gather("replicas/place", mine)
    listed = ranks.publish("replicas/places", sorted(answer for answer in answers or [] if answer is not None))
    return Replicas(ranks, min(copies, ranks.nodes), [(host, port) for _, host, port in listed])
