"""Addresses, ports and traffic of a machine, as the kernel writes them."""

from __future__ import annotations

import ctypes
import fcntl
import random
import socket
import struct
from pathlib import Path

import pytest

from lockstep_machine import network

IPV6 = "20010db8000000000000000000000001 02 40 00 80     eth0\nfe800000000000000000000000000001 02 40 20 80     eth0\nshort row\n"


def test_every_interface_with_an_address_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Entries of 40 bytes each, as 64-bit Linux writes them."""
    entries = b"".join(
        name.ljust(16, b"\0") + b"\2\0\0\0" + bytes([10, 0, 0, last]) + bytes(16)
        for name, last in ((b"lo", 1), (b"eth0", 2), (b"eth0:1", 3))
    )

    def ioctl(_: int, number: int, asked: bytes) -> bytes:
        if number == network.SIOCGIFNETMASK:
            if asked[23] == 3:
                raise OSError("it has lost the address meanwhile")
            return asked[:20] + bytes([255, 255, 252, 0]) + asked[24:]
        room, address = struct.unpack("iP", asked)
        assert room <= 1024 * 40
        ctypes.memmove(address, entries, len(entries))
        return struct.pack("iP", len(entries), address)

    (tmp_path / "net").mkdir()
    (tmp_path / "net/if_inet6").write_text(IPV6)
    monkeypatch.setattr(network, "PROC", tmp_path)
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert network.addresses() == [
        ("lo", "10.0.0.1", 22), ("eth0", "10.0.0.2", 22), ("eth0", "10.0.0.3", 32), ("eth0", "2001:db8::1", 64), ("eth0", "fe80::1", 64),
    ]  # fmt: skip
    assert network.interface_of("10.0.0.3") == "eth0" and network.interface_of("10.0.0.4") == ""


def test_ports_that_somebody_listens_on_are_those_of_both_protocols(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    head = "  sl  local_address rem_address   st\n"
    (tmp_path / "net/tcp").write_text(f"{head}   0: 0100007F:72D8 00000000:0000 0A\n   1: 0100007F:72D9 0100007F:0050 01\n")
    monkeypatch.setattr(network, "PROC", tmp_path)
    assert network.listening_ports() == {29400}
    (tmp_path / "net/tcp6").write_text(f"{head}   0: {'0' * 32}:0050 {'0' * 32}:0000 0A\n")
    assert network.listening_ports() == {29400, 80}


@pytest.mark.parametrize(("kernels", "is_below"), [("32768\t60999\n", True), ("1024\t65535\n", False), (None, True)])
def test_free_ports_are_below_those_of_connections_where_there_are_such(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: str | None, is_below: bool
) -> None:
    if kernels is not None:
        (tmp_path / "sys/net/ipv4").mkdir(parents=True)
        (tmp_path / "sys/net/ipv4/ip_local_port_range").write_text(kernels)
    monkeypatch.setattr(network, "PROC", tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", network.free_ports(1)[0]))
        monkeypatch.setattr(random, "sample", lambda ports, count: [taken.getsockname()[1], 20001, 20002])
        ports = network.free_ports(2)
    assert (ports == [20001, 20002]) is is_below and len({*ports} - {0}) == 2


def test_traffic_is_each_interface_s_bytes_without_loopback(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    rows = "Inter-| Receive\n face |bytes\n    lo: 7 0 0 0 0 0 0 0 7 0\n  eth0:1000 1 0 0 0 0 0 0 2000 1\n broken: 1\n"
    (tmp_path / "net/dev").write_text(rows)
    assert network.interface_bytes(tmp_path) == {"eth0": (1000, 2000)}
