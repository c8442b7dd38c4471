"""One host of a chain along which `lockstep cp` copies: it takes files, and passes them on to the next host while they arrive.

Its standard input and output lead to the person's machine. Lines come in that say where files go, and where they come from: from that
machine itself, from a path of this host, or from another host, which listens on its stated address for exactly one connection. Both ends of
that one prove a key that is made for this copy, and every line on it is signed; files are compared by the SHA-256 in such a line. What a
host passes on is read from its own disk, so a slow neighbor holds nobody up, and each of them goes on from what it has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lockstep.platforms.inpod.carry import Stored, TakeListener, draft_name, entries_below, give_all, take, words_of
from lockstep.platforms.inpod.destination import Destination
from lockstep.platforms.inpod.wire import CHUNK, CarryError, Entry, Gone, Wire
from lockstep_spec.codec import ContractError
from lockstep_spec.handshake import Opener, Sealer, Strangers, prove

PROTOCOL = "lockstep-station/1"
CONNECT_SECONDS = 5.0
PROOF_SECONDS = 10.0
AWAITED_SECONDS = 60.0
"""Seconds for which a host waits for the one that takes from it."""
TOLD_SECONDS = 0.5
POLL_SECONDS = 1.0
ACCEPT_SECONDS = 0.1
AGAIN = 75
"""Exit code where another try may help."""
STREAM = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
V = TypeVar("V")


class SealedWire(Wire):
    """Wire between two hosts: every line is signed and counted. Frames are not; their file's SHA-256 stands in a line."""

    def __init__(self, plain: Wire, connection: socket.socket, sealer: Sealer, opener: Opener) -> None:
        """`plain`: the wire that the proofs went over, with what came behind them."""
        super().__init__(connection.fileno(), connection.fileno())
        self._buffer, self._sealer, self._opener = plain._buffer, sealer, opener

    def say(self, value: object) -> None:
        self._write(self._sealer.seal({"says": value}))

    def _object(self) -> dict[str, Any]:
        try:
            value = self._opener.open(self._line())["says"]
        except (ContractError, KeyError) as error:
            raise CarryError(f"another host says what it has not signed: {error}") from None
        if not isinstance(value, dict):
            raise CarryError("another host says what is no answer")
        return value


def proved(connection: socket.socket, key: bytes, *, gives: bool) -> SealedWire:
    """Prove the key to the other end, and have it proved. `gives`: this end listened, and will give. Raises ContractError, CarryError,
    Gone, OSError.
    """
    for level, name, value in STREAM:
        connection.setsockopt(level, name, value)
    plain = Wire(connection.fileno(), connection.fileno(), PROOF_SECONDS)
    return SealedWire(plain, connection, *prove(plain.say, plain.hear, key, PROTOCOL, listened=gives))


class Inflow(TakeListener):
    """Files that arrive on this host, for the thread that passes it on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: list[Entry] = []
        self._name: object = None
        self._target: Destination | None = None
        self._sizes: dict[int, int] = {}
        self._digests: dict[int, str] = {}
        self._begun: set[int] = set()
        self._is_passed_on = self._is_lost = False
        self.ended = ""
        """Reason why no more arrives; '' while it may."""

    # ---- the taking thread

    def offered(self, entries: list[Entry], name: object, target: Destination) -> None:
        with self._changed:
            self._entries, self._name = entries, name
            self._target = target.again()
            self._changed.notify_all()

    def fits(self, wire: Wire) -> None:
        """Wait until the hosts below have said what they have, so that no byte is sent where one of them has no room. Raises Gone when one
        ends instead.
        """
        while self._is_passed_on:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_passed_on or self._is_lost, POLL_SECONDS)
            if self._is_lost:
                raise Gone("the next host ended before anything was sent")
            wire.busy()

    def planned(self, plan: Mapping[int, int], complete: Mapping[int, str]) -> None:
        with self._changed:
            self._begun |= {number for number, offset in plan.items() if offset} | set(complete)
            self._sizes |= {**plan, **{number: self._entries[number]["size"] for number in complete}}
            self._digests |= complete
            self._changed.notify_all()

    def grew(self, number: int, size: int) -> None:
        with self._changed:
            self._begun.add(number)
            self._sizes[number] = size
            self._changed.notify_all()

    def named(self, number: int, digest: str) -> None:
        with self._changed:
            self._digests[number] = digest
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        with self._changed:
            self.ended = reason
            self._changed.notify_all()

    # ---- the giving thread

    def lose(self) -> None:
        """Say that the host below has ended, or never came."""
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()

    def is_passed_on(self, yes: bool) -> None:
        """Say whether a host below has yet to say what it has."""
        with self._changed:
            self._is_passed_on = yes
            self._changed.notify_all()

    def awaited(self, find: Callable[[], V | None], meanwhile: Callable[[], None]) -> V:
        """First answer of `find` that isn't None, which is asked whenever something has arrived. Raises Gone when no more arrives."""
        while True:
            with self._changed:
                if (found := find()) is not None:
                    return found
                if self.ended:
                    raise Gone(self.ended)
                self._changed.wait(POLL_SECONDS)
            meanwhile()

    def listing(self, meanwhile: Callable[[], None]) -> Arrived:
        """Files that arrive here, once the giver has said which."""
        target = self.awaited(lambda: self._target, meanwhile)
        return Arrived(self, self._entries, self._name, target)

    def size(self, number: int, more_than: int) -> Callable[[], int | None]:
        """Question for `awaited`: bytes of the file that are here, once there are more."""
        return lambda: size if number in self._begun and (size := self._sizes.get(number, 0)) > more_than else None

    def digest(self, number: int) -> Callable[[], str | None]:
        """Question for `awaited`: the SHA-256 of the file, once it is complete."""
        return lambda: self._digests.get(number)


class Arrived:
    """Files that arrive here, as something to give: a file is given as far as it has come."""

    def __init__(self, arrivals: Inflow, entries: list[Entry], name: object, target: Destination) -> None:
        self.entries, self.name = entries, name
        self._arrivals, self._target = arrivals, target

    def begun(self, number: int, size: int, complete: bool, wire: Wire) -> Any:
        if not size and not complete:
            return None
        if complete:  # and it may be so here, too, or become so
            self._arrivals.awaited(self._arrivals.digest(number), wire.busy)
        elif size:
            self._arrivals.awaited(self._arrivals.size(number, size - 1), wire.busy)
        digest = hashlib.sha256()
        with self._open(number) as file:
            while size and (chunk := file.read(min(CHUNK, size))):
                digest.update(chunk)
                size -= len(chunk)
                wire.busy()
        return digest

    def chunks(self, number: int, offset: int, wire: Wire) -> Iterator[bytes]:
        size = self.entries[number]["size"]
        file = None
        try:
            while offset < size:
                here = self._arrivals.awaited(self._arrivals.size(number, offset), wire.waiting)
                if file is None:
                    file = self._open(number)
                    file.seek(offset)
                chunk = file.read(min(CHUNK, here - offset))
                if not chunk:
                    raise Gone("a file became shorter while it was passed on")
                offset += len(chunk)
                yield chunk
        finally:
            if file is not None:
                file.close()

    def fault(self, number: int, digest: str, wire: Wire) -> str:
        same = self._arrivals.awaited(self._arrivals.digest(number), wire.busy) == digest
        return (
            ""
            if same
            else (
                f"{socket.gethostname()}: {self._target.path(self.entries[number]['name'])} is not what arrived there: check that disk, and"
                " try again"
            )
        )

    def _open(self, number: int) -> Any:
        """Open the file by its name, or its draft while it has none."""
        holder, name = self._target.holder(self.entries[number]["name"], make=False)
        try:
            while True:
                complete = self._arrivals.digest(number)() is not None
                with contextlib.suppress(FileNotFoundError):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    return os.fdopen(os.open(name if complete else draft_name(name), flags, dir_fd=holder), "rb")
                if complete:
                    raise Gone(f"{self._target.path(self.entries[number]['name'])} was removed while it was passed on")
                time.sleep(0.01)  # it gets its name just now
        finally:
            os.close(holder)


class Station:
    """This host: what it was told, and its two ends."""

    def __init__(self, home: Wire) -> None:
        self._home = home
        self._saying = threading.Lock()
        self._arrivals = Inflow()
        self._is_alone = False
        self.is_fed_from_home = False
        """True if what is said to the person's machine belongs to the transfer from there."""
        self._passed = self._told = 0
        self._told_at = 0.0

    def say(self, **values: Any) -> None:
        with self._saying:
            self._home.say(values)

    def run(self) -> None:
        """Do all that is asked, until the person's machine closes the connection. Raises CarryError, OSError, Gone."""
        request = self._home.hear()
        key = bytes.fromhex(request["key"])
        if request["feeds"]:
            self._listen(request, key)
        wire, keep = self._upstream(key)
        self.is_fed_from_home = wire is self._home
        roots = [Path(os.path.realpath(root)) for root in request["roots"]]
        if request["private"]:
            os.umask(0o022)
        if not self.is_fed_from_home:
            threading.Thread(target=self._leash, daemon=True).start()
        try:
            counts = take(
                wire,
                request["take"],
                lambda path: any(root == path or root in path.parents for root in roots),
                passed=(lambda size: None) if self.is_fed_from_home else self._passing,
                expected=(lambda size: None) if self.is_fed_from_home else lambda size: self.say(expected=size),
                watch=self._arrivals,
                sender=request["sender"],
            )
        except (CarryError, OSError, Gone) as error:
            self._arrivals.end(str(error))
            raise
        if self.is_fed_from_home:  # (it has said so itself)
            self._leash()
        self._tell_passed()
        self.say(arrived=counts)
        threading.Event().wait()
        del keep

    def _leash(self) -> None:
        """End this process when the person's machine is gone, or needs it no more."""
        with contextlib.suppress(CarryError, Gone):
            while True:
                self._told_by_home(self._home.hear())
        os._exit(0)

    def _told_by_home(self, message: dict[str, Any]) -> None:
        if message.get("alone"):  # the next host gets everything another way
            self._is_alone = True
            self._arrivals.is_passed_on(False)

    # ---- where files come from

    def _upstream(self, key: bytes) -> tuple[Wire, Any]:
        while True:
            origin = self._home.hear()
            if "from" not in origin:
                self._told_by_home(origin)
                continue
            if origin["from"] == "home":
                return self._home, None
            if isinstance(origin["from"], str):
                return self._own(Path(origin["from"]).expanduser())
            address, port = origin["from"]
            try:
                connection = socket.create_connection((address, int(port)), CONNECT_SECONDS)
                wire = proved(connection, key, gives=False)
            except (ContractError, CarryError, Gone, OSError) as error:
                self.say(unreachable=f"no answer in {CONNECT_SECONDS:.0f} s" if isinstance(error, TimeoutError) else words_of(error))
                continue
            self.say(connected=True)
            return wire, connection

    def _own(self, source: Path) -> tuple[Wire, Any]:
        """Give a path of this host to itself."""
        entries = entries_below(source)
        one, other = socket.socketpair()
        given = Stored(source, entries)

        def give() -> None:
            try:
                give_all(Wire(one.fileno(), one.fileno()), given, lambda: None, lambda size: None, lambda size: None)
            except (CarryError, OSError, Gone) as error:
                with contextlib.suppress(Gone):
                    Wire(one.fileno(), one.fileno()).say({"failed": str(error)})

        threading.Thread(target=give, daemon=True).start()
        return Wire(other.fileno(), other.fileno()), (one, other)

    def _passing(self, size: int) -> None:
        self._passed += size
        if time.monotonic() - self._told_at > TOLD_SECONDS:
            self._tell_passed()

    def _tell_passed(self) -> None:
        self._told_at = time.monotonic()
        self.say(passed=self._passed - self._told)
        self._told = self._passed

    # ---- where they go on to

    def _listen(self, request: Entry, key: bytes) -> None:
        """Listen for the next host, and say where, or why not."""
        problem = "no port of the file's range is free"
        family = socket.AF_INET6 if ":" in request["address"] else socket.AF_INET
        for port in request["ports"]:
            try:
                listener = socket.create_server((request["address"], port), family=family, backlog=4)
            except OSError as error:
                problem = f"{request['address']} port {port}: {words_of(error)}"
                continue
            self._arrivals.is_passed_on(True)
            threading.Thread(target=self._give, args=(listener, key), daemon=True).start()
            self.say(listening=port)
            return
        self.say(listening=None, problem=problem)

    def _give(self, listener: socket.socket, key: bytes) -> None:
        """Give to the first that proves the key. That host says itself what goes wrong."""
        try:
            with self._accepted(listener, key) as wire:
                given = self._arrivals.listing(wire.busy)
                give_all(wire, given, lambda: self._arrivals.is_passed_on(False), lambda size: None, lambda size: None)
        except (CarryError, OSError, Gone):
            self._arrivals.lose()

    @contextlib.contextmanager
    def _accepted(self, listener: socket.socket, key: bytes) -> Iterator[SealedWire]:
        """The connection of the first that proves the key; then nobody listens any more. Raises Gone."""
        first: queue.Queue[tuple[socket.socket, SealedWire]] = queue.Queue()
        end = time.monotonic() + AWAITED_SECONDS
        strangers = Strangers()

        def prove(connection: socket.socket) -> None:
            try:
                wire = proved(connection, key, gives=True)
                strangers.discard(connection)
                first.put((connection, wire))
            except (CarryError, ContractError, Gone, OSError):
                strangers.discard(connection)
                connection.close()

        with listener:
            listener.settimeout(ACCEPT_SECONDS)
            while first.empty():
                if time.monotonic() > end or self._is_alone:
                    raise Gone("nobody came")
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    strangers.add(connection)
                    threading.Thread(target=prove, args=(connection,), daemon=True).start()
        connection, wire = first.get()
        with connection:
            yield wire


def main() -> None:
    station = Station(Wire(0, 1))
    try:
        station.run()
    except (CarryError, OSError) as error:
        with contextlib.suppress(Gone):
            station.say(failed=str(error))
        sys.exit(str(error))
    except Gone as error:
        if not station.is_fed_from_home:
            with contextlib.suppress(Gone):
                station.say(gone=str(error))
        sys.stderr.write(f"{error}\n")
        sys.exit(AGAIN)


if __name__ == "__main__":
    main()
