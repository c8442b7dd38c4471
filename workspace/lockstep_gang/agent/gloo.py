"""What CPU ranks talk over: gloo, and the network interface that it takes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from lockstep_gang.contract.fabric import RankFabric
from lockstep_gang.contract.run import Run

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class GlooInterface:
    """Looked up once, then told for every attempt of a job of CPU ranks; nothing for other jobs."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._name: str | None = None
        self._told_attempt = 0

    async def look(self) -> None:
        """In a thread: a name server that does not answer must not hold up the agent."""
        if self._run.gpus_per_node == 0 and self._run.fabric is not None:
            environment = {**os.environ, **self._run.environment}
            self._name = await asyncio.get_running_loop().run_in_executor(None, gloo_interface, environment)

    def news(self, attempt: int, group_rank: int) -> tuple[RankFabric, ...]:
        """Of every rank of the node, once an attempt."""
        if self._name is None or self._told_attempt == attempt:
            return ()
        self._told_attempt = attempt
        first = group_rank * self._run.ranks_per_node
        return tuple(RankFabric(first + i, networks=("gloo",), interface=self._name) for i in range(self._run.ranks_per_node))

    def forget_told(self) -> None:
        self._told_attempt = 0


def gloo_interface(environment: Mapping[str, str]) -> str:
    """The one that GLOO_SOCKET_IFNAME names, else the one that has the address of the host's own name; empty where it can't be known."""
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
