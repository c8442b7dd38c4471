"""One host of a copy to several: it takes files by the protocol of `lockstep cp`, and then gives them to other hosts by the same.

Its standard input and output lead to the person's machine. One line comes in that says where files go, and where they come from: from that
machine itself, from a path of this host, or from another host. Both ends of a connection between hosts prove a key that is made for this
copy, and every line on it is signed; files are compared by the SHA-256 in such a line.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.platforms.inpod.carry import Stored, below, failures_told, give_all, offer, serve, take, words_of
from lockstep_machine.wire import CarryError, Gone, Wire
from lockstep_spec.codec import ContractError
from lockstep_spec.handshake import prove, serve_proved

PROTOCOL = "lockstep-station/1"
CONNECT_SECONDS = 5.0
PROOF_SECONDS = 10.0


def proved_wire(connection: socket.socket, key: bytes, *, gives: bool) -> Wire:
    """Prove the key to another host, and have it proved. `gives`: this end listened. Raises ContractError, CarryError, Gone, OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire = Wire(connection.fileno(), connection.fileno())
    wire.allow(PROOF_SECONDS)
    sealer, opener = prove(wire.say, wire.hear, key, PROTOCOL, listened=gives)
    wire.seal(sealer.seal, opener.open)
    wire.allow(math.inf)
    return wire


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


def give_on(listener: socket.socket, key: bytes, given: Stored) -> None:
    """Give to every host that proves the key, until this process ends."""

    def give(wire: Wire) -> None:
        with failures_told(wire):
            offer(wire, given)
            give_all(wire, given)

    errors = (CarryError, ContractError, Gone, OSError, SystemExit)
    serve_proved(listener, lambda connection: proved_wire(connection, key, gives=True), give, errors)


def upstream(origin: Any, home: Wire, key: bytes) -> Wire:
    """Return the wire that files come over. Raises ContractError, CarryError, Gone, OSError."""
    if origin is None:
        return home
    if not isinstance(origin, str):
        connection = socket.create_connection((origin[0], int(origin[1])), CONNECT_SECONDS)
        wire = proved_wire(connection, key, gives=False)
        connection.detach()  # (it is open as long as this process)
        return wire
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
        threading.Thread(target=give_on, args=(listener, key, taken), daemon=True).start()
    while True:
        home.hear()


if __name__ == "__main__":
    own = Wire(0, 1)
    with failures_told(own):
        take_and_give(own)
