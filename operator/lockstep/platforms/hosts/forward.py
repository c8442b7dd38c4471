"""A port of this machine's loopback that leads to a port of a host's loopback, over the shared connection."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from lockstep.api.errors import Failed
from lockstep.kube.forward import HERE, held
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.ssh import Shared
from lockstep.platforms.places.values import Spot, Volume
from lockstep_machine.network import free_ports

if TYPE_CHECKING:
    from lockstep.api.hosts import Host

ATTEMPTS = 5
"""Times that another free port is tried: between its choice and its use, somebody else may take it."""


@asynccontextmanager
async def forwarded(place: HostPlace, port: int, local: int) -> AsyncIterator[int]:
    """The local port: `local`, or another free one where that is taken. It is closed again at the end.

    Raises:
        HostUnreachable: the host doesn't answer or doesn't let you in.
        Failed: the host's sshd forwards no ports.
    """
    await place.shared.open()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(place.program(["cat"]))  # a shared connection that only forwards would end after a minute
        yield await _forward(place.shared, port, local, stack)


def spot_on_host(volume: Volume, place: HostPlace, host: Host) -> Spot:
    """Return a host that has these files as a node for a person's programs."""

    async def desktop(folder: str) -> str:
        user, port = f"{host.user}@" if host.user else "", f":{host.port}" if host.port else ""
        return shlex.join(["code", "--remote", f"ssh-remote+{user}{host.name}{port}", folder])  # (it reaches the host by your own ssh)

    return Spot(host.name, volume, partial(forwarded, place), desktop, host, asyncio.Event().wait)


async def _forward(shared: Shared, port: int, local: int, stack: contextlib.AsyncExitStack) -> int:
    errors = ""
    for chosen in (local, *(0 for _ in range(ATTEMPTS))):
        number = chosen or free_ports(1)[0]
        try:
            stack.callback(held(number).close)
            taken = _is_taken(number)
        except OSError:
            taken = True
        if taken:
            errors = "Address already in use"
            continue
        rule = f"{HERE}:{number}:{HERE}:{port}"
        code, errors = await shared.control("forward", "-L", rule)
        if code == 0:
            stack.push_async_callback(shared.control, "cancel", "-L", rule)
            return number
        errors = errors.strip() or f"ssh ended with {code}"
    raise Failed(f"host {shared.login.name} forwards no port: {errors}")


def _is_taken(number: int) -> bool:
    """Return True if somebody listens on the port here."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HERE, number))
        except OSError:
            return True
    return False
