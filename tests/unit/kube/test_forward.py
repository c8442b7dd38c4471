"""A port of this machine's loopback: whoever it is that listens at the other loopback gets no browser."""

from __future__ import annotations

import asyncio
import socket

import pytest

from lockstep.kube.forward import HERE, listening

OTHER = "::1"
"""Browsers ask here first for a name below localhost, and go on to 127.0.0.1 where nobody listens."""


async def carry(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"ours")
    await writer.drain()


async def test_a_port_at_which_a_neighbor_listens_on_the_other_loopback_is_replaced() -> None:
    with socket.create_server((OTHER, 0), family=socket.AF_INET6) as neighbor:
        local = neighbor.getsockname()[1]
        async with listening(carry, local) as port:
            assert port != local
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HERE, local)


async def test_no_neighbor_can_listen_on_the_other_loopback_meanwhile() -> None:
    async with listening(carry, 0) as port:
        for address in (OTHER, "::"):
            with pytest.raises(OSError, match="in use"):
                socket.create_server((address, port), family=socket.AF_INET6)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(OTHER, port)
        reader, writer = await asyncio.open_connection(HERE, port)
        assert await reader.read() == b"ours"
        writer.close()
    socket.create_server((OTHER, port), family=socket.AF_INET6).close()


async def test_a_machine_without_that_loopback_listens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.kube.forward.has_dualstack_ipv6", lambda: False)
    async with listening(carry, 0) as port:
        assert port
