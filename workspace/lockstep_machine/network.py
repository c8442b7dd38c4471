"""Addresses and traffic of this machine's interfaces, and ports that somebody listens on. Python 3.6 reads it, too."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import random
import socket
import struct
from pathlib import Path
from typing import Any

from lockstep_machine.readings import PROC, file_words

SIOCGIFCONF, SIOCGIFNETMASK = 0x8912, 0x891B
IFREQ_BYTES, ADDRESS = 40, slice(20, 24)
"""A `struct ifreq` of 64-bit Linux: the interface's name, then its socket address, whose IPv4 address is here."""
INTERFACES_MAX = 1024
LISTENS = "0A"
CANDIDATES = 64
PORTS = range(11000, 29000)
"""Above those of Kubernetes' daemons, and below Lockstep's own and those of services."""


def addresses() -> Any:
    """Return (interface, address, length of its network's prefix) of all that this machine has, IPv4 first."""
    found = []
    answers = array.array("B", bytes(INTERFACES_MAX * IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        packed = fcntl.ioctl(asking.fileno(), SIOCGIFCONF, struct.pack("iP", len(answers), answers.buffer_info()[0]))
        data = answers.tobytes()[: struct.unpack("iP", packed)[0]]
        for start in range(0, len(data), IFREQ_BYTES):
            request = data[start : start + IFREQ_BYTES]
            name = request.split(b"\0", 1)[0].decode(errors="replace")
            prefix = 32
            with contextlib.suppress(OSError):  # (it has lost the address meanwhile)
                mask = fcntl.ioctl(asking.fileno(), SIOCGIFNETMASK, request)[ADDRESS]
                prefix = bin(int.from_bytes(mask, "big")).count("1")
            found.append((name.partition(":")[0], socket.inet_ntoa(request[ADDRESS]), prefix))
    for line in file_words(PROC / "net/if_inet6").splitlines():
        words = line.split()
        if len(words) == 6:
            found.append((words[5], str(ipaddress.IPv6Address(bytes.fromhex(words[0]))), int(words[2], 16)))
    return found


def interface_of(address: str) -> str:
    """Return the name of the interface that has this address; '' if none has."""
    return next((name for name, own, _ in addresses() if own == address), "")


def is_wireless(folder: Path) -> bool:
    """Return True if the folder, one of /sys/class/net, is of a wireless interface."""
    return (folder / "wireless").exists() or (folder / "phy80211").exists()


def listening_ports() -> Any:
    """Return all TCP ports that somebody listens on."""
    rows = [*tcp_rows(), *tcp_rows("tcp6")]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == LISTENS}


def free_ports(count: int) -> Any:
    """Return so many ports of loopback that nobody listens on now. Where there are such, they are below those that the kernel gives to
    connections: one of these may take a port before somebody listens there.
    """
    first = int((file_words(PROC / "sys/net/ipv4/ip_local_port_range").split() or [str(PORTS.stop)])[0])
    below = random.sample(PORTS, CANDIDATES) if first >= PORTS.stop else []
    with contextlib.ExitStack() as stack:
        ports: Any = []
        for port in [*below, *[0] * count]:
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(probe.getsockname()[1])
            if len(ports) == count:
                break
        return ports


def tcp_rows(name: str = "tcp") -> Any:
    """Return the words of each row of the kernel's table of TCP sockets; `tcp6`: of IPv6's."""
    return [line.split() for line in file_words(PROC / "net" / name).splitlines()[1:]]


def interface_bytes(proc: Path = PROC) -> Any:
    """Return interface → bytes in and out since it is up, without loopback."""
    pairs = [line.partition(":")[::2] for line in file_words(proc / "net/dev").splitlines()[2:]]
    numbers = {name.strip(): words.split() for name, words in pairs}
    return {name: (int(words[0]), int(words[8])) for name, words in numbers.items() if name != "lo" and len(words) >= 9}
