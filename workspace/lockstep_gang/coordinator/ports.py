"""Ports on node 0, where the coordinator and rank 0 both are."""

from __future__ import annotations

import ipaddress
import socket

CANDIDATES = 64


def is_loopback(address: str) -> bool:
    """Whether all nodes are this machine; a name is never taken for loopback."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def free_port(address: str, first: int) -> int:
    """A port from `first` on that nobody listens on here. `first` itself when none is: the rank that meets it says so."""
    host = address if is_loopback(address) else ""
    return next((port for port in range(first, min(first + CANDIDATES, 65536)) if _is_free(host, port)), first)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
