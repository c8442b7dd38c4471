"""Copies of shards on other nodes' volumes: each node also keeps its neighbor's, so that any one volume may be lost.

A rank sends its shard to the next node once it is durable on its own volume, in the background of the save, and acknowledges when it is
durable there too. A neighbor that can't keep it costs the second copy, never the commit: the manifest names the nodes that
have each shard, and the log says where one copy is all there is.

Shards go from node to node over TCP, one file a connection, on which both ends first prove the run's secret (`handshake.prove`).

    client → server   the request, a signed line
    client → server   the file, in chunks
    server → client   the problem, or null once the file is durable: a signed line

The file's SHA-256 stands in a signed line, so its chunks need no signature. They are not encrypted. Nothing is unpickled, no path is taken
from the wire, and a transfer holds one chunk in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lockstep_machine.wire import CHUNK, CarryError, Gone, Wire
from lockstep_spec.codec import ContractError
from lockstep_spec.files import durable_file, make_directory
from lockstep_spec.handshake import prove, serve_proved
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.layout import is_shard, parse_commit
from lockstep_train.checkpoint.format.manifest import Manifest, ShardRecord
from lockstep_train.report import print_error

PURPOSE = "lockstep-replicas/2"
DEADLINE_SECONDS = 300.0
STRANGER_SECONDS = 10.0
"""Time limit of whoever hasn't proved the secret."""


class TransferError(OSError):
    """The other side refused, went away, or sent something else than it promised."""


def proved_wire(connection: socket.socket, secret: bytes, seconds: float, *, listened: bool) -> Wire:
    """Prove the run's secret, and have it proved, within so many seconds. Raises ContractError, CarryError, Gone, OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire = Wire(connection.fileno(), connection.fileno(), DEADLINE_SECONDS)
    wire.allow(seconds)
    sealer, opener = prove(wire.say, wire.hear, secret, PURPOSE, listened=listened)
    wire.seal(sealer.seal, opener.open)
    return wire


def send_file(wire: Wire, path: Path) -> None:
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            wire.pass_on(chunk)
    wire.pass_on(b"")


def receive_file(wire: Wire, path: Path, size: int, sha256: str) -> None:
    """Receive a file: it is durable under its name, or not there. Raises CarryError, Gone, OSError."""
    digest = hashlib.sha256()
    with durable_file(path) as file:
        for chunk in wire.frames():
            size -= len(chunk)
            if size < 0:
                break
            digest.update(chunk)
            file.write(chunk)
        if size or digest.hexdigest() != sha256:
            raise CarryError(f"{path.name} arrived with another size or checksum")


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
        self.place: ServerAddress = (host, self._socket.getsockname()[1])
        errors = (CarryError, Gone, OSError, ValueError, KeyError, TypeError)  # (the client says what it met)
        threading.Thread(
            target=serve_proved, args=(self._socket, self._meet, self._answer, errors), name="lockstep-replicas", daemon=True
        ).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; closing alone doesn't
        self._socket.close()

    def _meet(self, connection: socket.socket) -> Wire:
        return proved_wire(connection, self._secret, STRANGER_SECONDS, listened=True)

    def _answer(self, wire: Wire) -> None:
        wire.allow(DEADLINE_SECONDS)
        request = wire.hear()
        shard = Shard(request["commit"], request["file"], request["bytes"], request["sha256"])
        name = parse_commit(shard.commit)
        if name is None or not is_shard(shard.file):
            raise TransferError("no such file")
        path = self._checkpoints / str(name) / shard.file
        problem = self._keep(wire, path, shard) if name.attempt == self._attempt else "it is of another attempt"
        wire.say({"problem": problem})
        if problem is not None:
            for _ in wire.frames():  # (a connection that is closed before their end is reset, and what was said is lost)
                pass

    def _keep(self, wire: Wire, path: Path, shard: Shard) -> str | None:
        try:
            make_directory(path.parent)
            receive_file(wire, path, shard.bytes, shard.sha256)
        except OSError as error:
            return f"{path} can't be written: {error.strerror}"
        return None


def put_shard(place: ServerAddress, secret: bytes, shard: Shard, path: Path, deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Send a file, and wait until it is durable on the other node's volume. Raises OSError."""
    with socket.create_connection(place, timeout=min(10.0, deadline_seconds)) as connection:
        try:
            wire = proved_wire(connection, secret, deadline_seconds, listened=False)
            wire.say(asdict(shard))
            send_file(wire, path)
            problem = wire.hear()["problem"]
        except ContractError as error:
            raise TransferError(f"the other side is not of this run: {error}") from None
        except (CarryError, Gone) as error:
            raise TransferError(str(error)) from None
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
