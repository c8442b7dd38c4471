"""Errors on the way to another node or to the operator, in words for whoever looks after the cluster."""

from __future__ import annotations

import asyncio
import errno
import socket

from lockstep_gang.contract.report import Trouble, TroubleKind

RESOLVE_SECONDS = 4.0
"""Limit of a look-up: the C library waits up to 20 s for a name server that doesn't answer."""
_UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EACCES, errno.EPERM})
_UNKNOWN_NAME = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


def trouble_of(error: Exception, host: str, port: int, whom: str) -> Trouble | None:
    """Return the trouble; None: the listener just isn't up yet, or nobody knows."""
    reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
    if isinstance(error, socket.gaierror):
        if error.errno in _UNKNOWN_NAME:
            return Trouble(TroubleKind.NAME, f"the cluster's DNS doesn't know {host}, the name of {whom} ({reason})")
        return Trouble(TroubleKind.DNS, f"the cluster's DNS doesn't answer: {host}, the name of {whom}, can't be resolved ({reason})")
    if any(kind.__name__ == "SSLError" for kind in type(error).__mro__):  # ssl itself takes 30 ms to import
        return Trouble(TroubleKind.REFUSED, f"{whom} at {host}:{port} has an untrusted certificate, or does not speak TLS ({reason})")
    is_timeout = isinstance(error, (TimeoutError, asyncio.TimeoutError))
    if is_timeout or (isinstance(error, OSError) and error.errno in _UNREACHABLE):
        why = "no answer" if is_timeout else reason
        return Trouble(TroubleKind.NETWORK, f"{whom} at {host}:{port} can't be reached ({why}): a NetworkPolicy or the network blocks it")
    return None


async def resolved(host: str, port: int) -> None:
    """Return when the name is known. Raises socket.gaierror, also where no name server answers in time."""
    lookup = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        await asyncio.wait_for(lookup, RESOLVE_SECONDS)
    except asyncio.TimeoutError:  # noqa: UP041 (another class in Python 3.10)
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer within {RESOLVE_SECONDS:.0f} s") from None
