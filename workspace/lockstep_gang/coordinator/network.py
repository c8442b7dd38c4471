"""A node's network: addresses on which it listens, free ports there (on node 0 the coordinator and rank 0 both listen), and errors on the
way to another node or to the operator, in words for whoever looks after the cluster.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Iterable

from lockstep_gang.contract.placewords import IN_PODS, PlaceWords
from lockstep_gang.contract.run import POD_IPS
from lockstep_gang.contract.trouble import Trouble, TroubleKind

CANDIDATES = 64
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 (probed, not served)


def is_loopback(address: str) -> bool:
    """Return True if all nodes are this machine; a name is never taken for loopback."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def listening_addresses(address: str) -> list[str] | None:
    """Addresses to listen on for those who know this node as `address`: nobody is to be met on a rail's or an administrator's network.

    None, which is all interfaces, where nobody says which are the pod's.
    """
    if is_loopback(address):
        return [address]
    addresses = [text for text in os.environ.get(POD_IPS, "").split(",") if _is_address(text)]
    return addresses or None


def listening_socket(address: str, port: int) -> socket.socket | None:
    """Socket for those who know this node as `address`, instead of torch's own, which listens on all interfaces. None: no address is known,
    or none is free.
    """
    for host in listening_addresses(address) or []:
        listening = socket.socket(_family(host))
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(CANDIDATES)
        except OSError:
            listening.close()
        else:
            return listening
    return None


def free_port(address: str, first: int) -> int:
    """A port from `first` on that nobody listens on here, in either family. `first` itself when none is: the rank that meets it says so."""
    hosts = [address] if is_loopback(address) else _WILDCARDS
    return next((port for port in range(first, min(first + CANDIDATES, 65536)) if _is_free(hosts, port)), first)


def any_free_port(address: str) -> int:
    """A port that nobody listens on here now, in either family. Raises OSError."""
    hosts = [address] if is_loopback(address) else _WILDCARDS
    for _ in range(CANDIDATES):
        with socket.socket(_family(hosts[0])) as probe:
            probe.bind((hosts[0], 0))
            port = int(probe.getsockname()[1])
        if _is_free(hosts, port):
            return port
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_free(hosts: Iterable[str], port: int) -> bool:
    return all(_is_free_on(host, port) for host in hosts)


def _is_free_on(host: str, port: int) -> bool:
    """Return True also where this machine doesn't have the family: nobody listens there."""
    try:
        probe = socket.socket(_family(host))
    except OSError:
        return True
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family is socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL
    return True


RESOLVE_SECONDS = 4.0
"""Limit of a look-up: the C library waits up to 20 s for a name server that doesn't answer."""
_UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EACCES, errno.EPERM})
_UNKNOWN_NAME = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


def trouble_of(error: Exception, host: str, port: int, whom: str, place: PlaceWords = IN_PODS) -> Trouble | None:
    """Return the trouble; None: the listener just isn't up yet, or nobody knows."""
    reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
    if isinstance(error, socket.gaierror):
        if error.errno in _UNKNOWN_NAME:
            return Trouble(TroubleKind.NAME, f"{place.name_service} doesn't know {host}, the name of {whom} ({reason})")
        return Trouble(TroubleKind.DNS, f"{place.name_service} doesn't answer: {host}, the name of {whom}, can't be resolved ({reason})")
    if any(kind.__name__ == "SSLError" for kind in type(error).__mro__):  # ssl itself takes 30 ms to import
        return Trouble(TroubleKind.REFUSED, f"{whom} at {host}:{port} has an untrusted certificate, or does not speak TLS ({reason})")
    is_timeout = isinstance(error, (TimeoutError, asyncio.TimeoutError))
    if is_timeout or (isinstance(error, OSError) and error.errno in _UNREACHABLE):
        why = "no answer" if is_timeout else reason
        return Trouble(TroubleKind.NETWORK, f"{whom} at {host}:{port} can't be reached ({why}): {place.blocked}")
    return None


async def resolved(host: str, port: int) -> None:
    """Return when the name is known. Raises socket.gaierror, also where no name server answers in time."""
    lookup = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        await asyncio.wait_for(lookup, RESOLVE_SECONDS)
    except asyncio.TimeoutError:  # noqa: UP041 (another class in Python 3.10)
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer within {RESOLVE_SECONDS:.0f} s") from None
