"""One host of a copy to several: it takes files by the protocol of `lockstep cp`, and then gives them to other hosts by the same.

Its standard input and output lead to the person's machine. One line comes in that says where files go, and where they come from: from that
machine itself, from a path of this host, or from another host. Both ends of a connection between hosts prove a key that is made for this
copy, and every line on it is signed; files are compared by the SHA-256 in such a line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.platforms.inpod.carry import Stored, below, failures_told, give_all, serve, take, words_of
from lockstep.platforms.inpod.wire import SILENCE_SECONDS, CarryError, Entry, Gone, Wire
from lockstep_spec.codec import ContractError
from lockstep_spec.handshake import Strangers, prove

PROTOCOL = "lockstep-station/1"
CONNECT_SECONDS = 5.0
PROOF_SECONDS = 10.0


class SealedWire(Wire):
    """Wire between two hosts: every line is signed and counted. Frames are not; their file's SHA-256 stands in a line."""

    def __init__(self, connection: socket.socket, key: bytes, *, gives: bool) -> None:
        """Prove the key to the other end, and have it proved. `gives`: this end listened. Raises ContractError, CarryError, Gone,
        OSError.
        """
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(connection.fileno(), connection.fileno(), PROOF_SECONDS)
        self._connection = connection  # (open as long as this)
        self._sealer, self._opener = prove(super().say, super()._object, key, PROTOCOL, listened=gives)
        self._silence = SILENCE_SECONDS

    def say(self, value: Entry) -> None:
        self._write(self._sealer.seal(value))

    def _object(self) -> Entry:
        try:
            return self._opener.open(self._line())
        except ContractError as error:
            raise CarryError(f"another host says what it has not signed: {error}") from None


def listening(address: str | None, ports: list[int]) -> tuple[socket.socket | None, str]:
    """Listen at the first port that is free; else return the reason why other hosts get nothing from this one."""
    if address is None:
        return None, "its address is not known: state hosts[].address"
    problem = "no port of the file's range is free"
    for port in ports:
        try:
            return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET), ""
        except OSError as error:
            problem = f"{address} port {port}: {words_of(error)}"
    return None, problem


def give_on(listener: socket.socket, key: bytes, given: Callable[[], Stored]) -> None:
    """Give to every host that proves the key, until this process ends."""
    strangers = Strangers()

    def give(connection: socket.socket) -> None:
        with connection, contextlib.suppress(CarryError, ContractError, Gone, OSError, SystemExit):
            try:
                wire = SealedWire(connection, key, gives=True)
            finally:
                strangers.discard(connection)
            with failures_told(wire):
                give_all(wire, given())

    while True:
        connection, _ = listener.accept()
        strangers.add(connection)
        threading.Thread(target=give, args=(connection,), daemon=True).start()


def upstream(origin: Any, home: Wire, key: bytes) -> Wire:
    """Return the wire that files come over. Raises ContractError, CarryError, Gone, OSError."""
    if origin is None:
        return home
    if not isinstance(origin, str):
        return SealedWire(socket.create_connection((origin[0], int(origin[1])), CONNECT_SECONDS), key, gives=False)
    mine, its = (end.detach() for end in socket.socketpair())
    request = {"give": str(Path(origin).expanduser()), "roots": ["/"], "ownUmask": True}
    threading.Thread(target=serve, args=(request, Wire(its, its)), daemon=True).start()
    return Wire(mine, mine)


def take_and_give(home: Wire) -> None:
    """Take and give until the person's machine closes the connection. Raises CarryError, OSError, Gone."""
    request = home.hear()
    key, is_from_home = bytes.fromhex(request["key"]), request["from"] is None
    listener, problem = listening(request["address"], request["ports"])
    home.say({"port": listener and listener.getsockname()[1], "deaf": problem})
    try:
        wire = upstream(request["from"], home, key)
    except (ContractError, CarryError, Gone, OSError) as error:
        home.say({"unreachable": f"no answer in {CONNECT_SECONDS:.0f} s" if isinstance(error, TimeoutError) else words_of(error)})
        return

    if request["private"]:
        os.umask(0o022)

    def report(what: str) -> Callable[[int], None]:
        return lambda size: None if is_from_home else home.say({what: size})

    taken = take(wire, request["take"], below(request["roots"]), report("passed"), report("expected"), sender=request["sender"])
    if not is_from_home:
        home.say({"arrived": taken.counts})
    if listener is not None:
        threading.Thread(target=give_on, args=(listener, key, taken.given), daemon=True).start()
    while True:
        home.hear()


if __name__ == "__main__":
    own = Wire(0, 1)
    with failures_told(own):
        take_and_give(own)
