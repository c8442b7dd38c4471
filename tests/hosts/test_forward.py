"""Ports of this machine's loopback that lead to a host's loopback, and are closed again."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lockstep.platforms.hosts import forward
from lockstep.platforms.hosts.forward import HERE, forwarded
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.ssh import HostUnreachable
from support.clusters import bed_hosts
from support.clusters.bed_hosts import BedHosts
from support.clusters.bed_ssh import Ways

PORT = 18080


@asynccontextmanager
async def web_server(place: HostPlace) -> AsyncIterator[None]:
    """A web server on the host's loopback."""
    async with place.program(["python3", "-u", "-m", "http.server", "--bind", HERE, "--directory", "/etc", str(PORT)]) as server:
        assert b"Serving" in await server.read()
        yield


def fetched(port: int) -> str:
    with urllib.request.urlopen(f"http://{HERE}:{port}/hostname", timeout=20) as answer:
        return str(answer.read().decode().strip())


def test_a_port_leads_to_the_hosts_loopback_and_is_closed_again(ways: Ways) -> None:
    async def through() -> tuple[str, int]:
        place = ways.place(1)
        async with web_server(place), forwarded(place, PORT, 0) as port:
            return await asyncio.to_thread(fetched, port), port

    name, port = asyncio.run(through())
    assert name == "bed1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, port), timeout=5)


async def test_two_hosts_have_a_port_each_at_once(ways: Ways) -> None:
    first, second = ways.place(0), ways.place(1)
    async with web_server(first), web_server(second), forwarded(first, PORT, 0) as one, forwarded(second, PORT, 0) as other:
        assert one != other
        assert {await asyncio.to_thread(fetched, port) for port in (one, other)} == {"bed0", "bed1"}


async def test_a_port_that_is_taken_is_replaced(ways: Ways) -> None:
    place = ways.place()
    with socket.create_server((HERE, 0)) as other:
        local = other.getsockname()[1]
        async with forwarded(place, PORT, local) as port:
            assert port != local
    async with forwarded(place, PORT, local) as port:
        assert port == local


async def test_a_port_that_a_neighbor_takes_meanwhile_is_replaced(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens there would get the editor's token."""
    asked: list[int] = []
    monkeypatch.setattr(forward, "_is_taken", lambda number: number in asked or asked.append(number))
    with socket.create_server((HERE, 0)) as neighbor:
        local = neighbor.getsockname()[1]
        async with forwarded(ways.place(), PORT, local) as port:
            assert port != local


async def test_a_port_at_which_a_neighbor_listens_on_the_other_loopback_is_replaced(ways: Ways) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as neighbor:
        local = neighbor.getsockname()[1]
        async with forwarded(ways.place(), PORT, local) as port:
            assert port != local


async def test_nobody_but_this_machine_reaches_the_port(bed: BedHosts, ways: Ways) -> None:
    async with forwarded(ways.place(), PORT, 0) as port:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((bed.layout.gateway, port), timeout=5)


async def test_a_host_that_is_off_forwards_nothing(bed: BedHosts, ways: Ways) -> None:
    bed_hosts.power_off(bed.host(2))
    with pytest.raises(HostUnreachable, match="host bed2 can't be reached: it doesn't answer"):
        async with forwarded(ways.place(2), PORT, 0):
            pass
