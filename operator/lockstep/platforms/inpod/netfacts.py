"""Facts about a node's network: ports with their addresses and line rates, and RDMA devices.

Imported by the network program, and sent with it.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

from lockstep_machine.limits import usable_cores
from lockstep_machine.network import addresses, is_wireless
from lockstep_machine.rdma import gigabits, rdma_ports
from lockstep_machine.readings import file_words, folder_names

PORTS_MAX, TEXT_MAX = 64, 200
SIOCETHTOOL, GET_DRIVER = 0x8946, 0x3
SPEEDLESS_DRIVERS = frozenset({"veth", "tun", "bridge", "dummy", "tunnel", "vxlan", "wireguard", ""})
"""Drivers without a line rate: veth calls itself 10 Gb/s whatever it is laid over."""
Json = dict[str, Any]


def network_facts(root: Path = Path("/")) -> Json:
    """Return the ports with an address and the RDMA devices of this node."""
    own: dict[str, tuple[str, int]] = {}
    for name, address, prefix in addresses():
        if not ipaddress.ip_address(address).is_link_local:
            own.setdefault(name, (address, prefix))
    return {
        "host": socket.gethostname()[:TEXT_MAX],
        "cores": usable_cores(root),
        "ports": [_port(root, name, *own[name]) for _, name in socket.if_nameindex() if name != "lo" and name in own][:PORTS_MAX],
        "hcas": _hcas(root)[:PORTS_MAX],
        "tools": [tool for tool in ("ib_write_bw",) if shutil.which(tool)],
    }


def _port(root: Path, name: str, address: str, prefix: int) -> Json:
    """One network interface."""
    folder = root / "sys/class/net" / name
    driver = _driver(name)
    speed = file_words(folder / "speed")  # (-1: not known)
    known = speed.isdecimal() and int(speed) > 0 and driver not in SPEEDLESS_DRIVERS
    mtu = file_words(folder / "mtu")
    return {
        "name": name,
        "address": address,
        "prefix": prefix,
        "mtu": int(mtu) if mtu.isdecimal() else None,
        "gbs": int(speed) / 1000 if known else None,
        "driver": driver,
        "wireless": is_wireless(folder),
        "hca": next(iter(folder_names(folder / "device/infiniband")), ""),
    }


def _hcas(root: Path) -> list[Json]:
    """Ports of RDMA devices that are up and may be opened here."""
    ports = [port for port in rdma_ports(root) if port.state == "ACTIVE" and port.openable]
    return [{"device": port.device, "port": port.port, "gbs": gigabits(port.rate)} for port in ports]


def _driver(name: str) -> str:
    """Name of the interface's driver, as ethtool has it; '' where it has none."""
    data = array.array("B", struct.pack("I", GET_DRIVER) + bytes(192))
    request = struct.pack("16sP", name.encode()[:15], data.buffer_info()[0]) + bytes(16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            fcntl.ioctl(asking.fileno(), SIOCETHTOOL, request)
        except OSError:
            return ""
    return data.tobytes()[4:36].split(b"\0")[0].decode(errors="replace")
