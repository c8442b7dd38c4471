"""Which network interface gloo takes: the one that GLOO_SOCKET_IFNAME names, else the one that holds the address of the host's own name."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def gloo_interface(environment: Mapping[str, str]) -> str:
    """Empty where it can't be known."""
    named = environment.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return named
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        return next((name for _, name in socket.if_nameindex() if _address(name) == address), "")
    return ""


def _address(interface: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        return socket.inet_ntoa(answer[20:24])
    return ""
