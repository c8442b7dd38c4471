"""Facts about a node's network: ports with their addresses and line rates, and RDMA devices.

Imported by the network program, and sent with it.
"""

from __future__ import annotations

import array
import fcntl
import re
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

from lockstep_spec.kernel import file_words, folder_names, gigabits, rdma_ports, usable_cores

PORTS_MAX, TEXT_MAX = 64, 200
SIOCGIFADDR, SIOCGIFNETMASK, SIOCGIFMTU, SIOCETHTOOL, GET_DRIVER = 0x8915, 0x891B, 0x8921, 0x8946, 0x3
SPEEDLESS_DRIVERS = frozenset({"veth", "tun", "bridge", "dummy", "tunnel", "vxlan", "wireguard", ""})
"""Drivers without a line rate: veth calls itself 10 Gb/s whatever it is laid over."""
Json = dict[str, Any]


def network_facts(root: Path = Path("/")) -> Json:
    """Return the ports with an address and the RDMA devices of this node."""
    return {
        "host": socket.gethostname()[:TEXT_MAX],
        "cores": usable_cores(root),
        "ports": [port for _, name in socket.if_nameindex() if name != "lo" for port in [_port(root, name)] if port][:PORTS_MAX],
        "hcas": _hcas(root)[:PORTS_MAX],
        "tools": [tool for tool in ("ib_write_bw",) if shutil.which(tool)],
    }


def _port(root: Path, name: str) -> Json | None:
    """One network interface; None without an address."""
    address, prefix = _address(name)
    if not address:
        return None
    folder = root / "sys/class/net" / name
    driver = _driver(name)
    speed = _number(file_words(folder / "speed"))
    known = speed is not None and speed > 0 and driver not in SPEEDLESS_DRIVERS
    return {
        "name": name,
        "address": address,
        "prefix": prefix,
        "mtu": struct.unpack_from("i", _interface_word(name, SIOCGIFMTU), 0)[0],
        "gbs": speed / 1000 if known and speed is not None else None,
        "driver": driver,
        "wireless": (folder / "wireless").exists() or (folder / "phy80211").exists(),
        "hca": next(iter(folder_names(folder / "device/infiniband")), ""),
    }


def _hcas(root: Path) -> list[Json]:
    """Ports of RDMA devices that are up and may be opened here."""
    ports = [port for port in rdma_ports(root) if port.state == "ACTIVE" and port.openable]
    return [{"device": port.device, "port": port.port, "gbs": gigabits(port.rate)} for port in ports]


def _address(name: str) -> tuple[str, int]:
    """IPv4 address and length of its network's prefix, else a global IPv6 address; ('', 0) where there is none."""
    try:
        address, mask = (_interface_word(name, request)[4:8] for request in (SIOCGIFADDR, SIOCGIFNETMASK))
        return socket.inet_ntoa(address), bin(int.from_bytes(mask, "big")).count("1")
    except OSError:
        pass
    for line in file_words(Path("/proc/net/if_inet6")).splitlines():
        words = line.split()
        if len(words) == 6 and words[5] == name and words[3] == "00":
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])), int(words[2], 16)
    return "", 0


def _interface_word(name: str, request: int) -> bytes:
    """Answer of the kernel about an interface, behind its name. Raises OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer: bytes = fcntl.ioctl(asking.fileno(), request, struct.pack("256s", name.encode()[:15]))
    return answer[16:]


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


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else None
