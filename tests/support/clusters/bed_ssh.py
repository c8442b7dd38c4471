"""Ways of the product's own ssh to the hosts of the tests' bed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.devcluster.hosts import bed as running
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.ssh import Login, Shared
from support.clusters.bed_hosts import BedHosts, eventually


def login_to(bed: BedHosts, number: int, **changes: Any) -> Login:
    """Way to a host as the bed's cluster file states it."""
    host = bed.host(number)
    login = Login(host.name, user="ada", identity=str(bed.layout.identity), host_key=running.host_key(host), address=host.address)
    return replace(login, **changes)


@contextmanager
def few_logins(bed: BedHosts, number: int) -> Iterator[None]:
    """Let only two logins begin at once on the host: two that are held until sshd has turned another one away, as it must."""
    limit, host = "/etc/ssh/sshd_config.d/few.conf", bed.host(number)

    def refusals() -> int:
        return bed.console(number, "journalctl", "--unit=ssh", "--output=cat", "--no-pager").count("MaxStartups")

    bed.console(number, "sh", "-c", f"echo MaxStartups 2:100:2 > {limit}; systemctl restart ssh")
    try:  # (the restart has ended once sshd listens: no other connection counts)
        before = refusals()
        with ExitStack() as held, ThreadPoolExecutor() as pool:
            for _ in range(2):
                connection = held.enter_context(socket.create_connection((host.address, 22), timeout=60))
                assert connection.recv(4) == b"SSH-"

            def release() -> bool:
                with held:
                    return eventually(lambda: refusals() > before)

            is_refused = pool.submit(release)
            yield
        assert is_refused.result(), "some were turned away"
    finally:
        bed.console(number, "sh", "-c", f"rm {limit}; systemctl restart ssh")
        running.await_sshd(host)


class Ways:
    """Places of the bed's hosts, whose shared connections end with the test."""

    def __init__(self, bed: BedHosts, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self._opened: list[Shared] = []

    def place(self, number: int = 0, **changes: Any) -> HostPlace:
        """Host as a place; `changes` are of its login."""
        shared = Shared(login_to(self.bed, number, **changes), self.folder)
        self._opened.append(shared)
        return HostPlace(shared)

    async def close(self) -> None:
        for shared in self._opened:
            await shared.close()
