"""Reports of this node's ranks about their fabric: what is new in NCCL's logs, and the interface that gloo uses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lockstep_gang.agent.ranks.environment import inherited
from lockstep_gang.agent.ranks.ranks import LocalRanks
from lockstep_gang.contract.fabric import RankFabric
from lockstep_gang.contract.messages import FabricSeen
from lockstep_gang.contract.run import Run
from lockstep_machine.network import interface_of

READ_SECONDS = 1.0
"""Time between two looks at NCCL's logs."""


class FabricReporter:
    """Reports about the newest attempt's ranks while they run."""

    def __init__(self, run: Run, send: Callable[[FabricSeen], None]) -> None:
        self._gloo = GlooInterface(run)
        self._send = send

    def forget_sent(self, ranks: LocalRanks | None) -> None:
        """Report everything again: the listener is new."""
        self._gloo.forget_sent()
        if ranks is not None:
            ranks.nccl.forget_sent()

    def tell(self, ranks: LocalRanks | None) -> None:
        if ranks is None or not ranks.leaders:
            return
        fabrics = (*ranks.nccl.news(), *self._gloo.news(ranks.attempt, ranks.numbers))
        if fabrics:
            self._send(FabricSeen(ranks.attempt, fabrics))

    async def watch(self, newest: Callable[[], LocalRanks | None]) -> None:
        """Report what is new every second, until cancelled."""
        while True:
            self.tell(newest())
            await asyncio.sleep(READ_SECONDS)


class GlooInterface:
    """Interface that gloo uses, looked up once and reported for every attempt of a job of CPU ranks; nothing for other jobs."""

    def __init__(self, run: Run) -> None:
        silent = run.gpus_per_node > 0 or run.fabric is None
        self._name = None if silent else gloo_interface({**inherited(), **run.environment})
        self._sent_attempt = 0

    def news(self, attempt: int, ranks: Iterable[int]) -> tuple[RankFabric, ...]:
        """Fabric of these ranks, which are the node's, once an attempt."""
        if self._name is None or self._sent_attempt == attempt:
            return ()
        self._sent_attempt = attempt
        return tuple(RankFabric(rank, networks=("gloo",), interface=self._name) for rank in ranks)

    def forget_sent(self) -> None:
        self._sent_attempt = 0


def gloo_interface(environment: Mapping[str, str], hosts: Path = Path("/etc/hosts")) -> str:
    """Name of the interface in GLOO_SOCKET_IFNAME, else of the one that has the address of the host's own name; empty if that isn't known.

    The address comes from the file that the kubelet writes: no name server is asked, which might not answer.
    """
    named = environment.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return named
    with contextlib.suppress(OSError):
        address = _address_of(socket.gethostname(), hosts.read_text(encoding="utf-8", errors="replace"))
        return interface_of(address) if address else ""
    return ""


def _address_of(host: str, hosts: str) -> str:
    entries = (line.partition("#")[0].split() for line in hosts.splitlines())
    return next((words[0] for words in entries if host in words[1:] and ":" not in words[0]), "")
