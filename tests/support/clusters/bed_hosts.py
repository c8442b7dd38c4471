"""Hosts of the tests' bed: what a test does to them, and what a person on the laptop types."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lockstep.devcluster.hosts import bed as running
from lockstep.devcluster.hosts.layout import BedLayout, HostLayout

WAIT_SECONDS = 60.0
OLD_PYTHON = """#!/bin/sh
exec /usr/bin/python3 -c '
import platform, sys
sys.version_info = (3, 9, 2, "final", 0)
platform.python_version = lambda: "3.9.2"
words = sys.argv[1:]
place = words.index("-c")
sys.argv = ["-c", *words[place + 2 :]]
exec(compile(words[place + 1], "<string>", "exec"), {"__name__": "__main__"})
' "$@"
"""
"""A python3 that says it is 3.9."""
T = TypeVar("T")


@dataclass(frozen=True)
class BedHosts:
    """A bed that is up, with so many hosts."""

    layout: BedLayout
    count: int

    @property
    def hosts(self) -> list[HostLayout]:
        return [self.layout.host(number) for number in range(self.count)]

    def host(self, number: int) -> HostLayout:
        return self.layout.host(number)

    def console(self, number: int, *command: str, stdin: bytes = b"") -> str:
        """Output of root's command on the host. Raises BedError."""
        return running.console(self.host(number), *command, stdin=stdin).decode()

    def ssh(self, number: int, *command: str, user: str = "ada") -> subprocess.CompletedProcess[str]:
        """Run the command as a person would, by ssh itself; never raises."""
        host = self.host(number)
        known = self.layout.laptop / "known_hosts"
        known.write_text("".join(f"{each.address} {running.host_key(each)}\n" for each in self.hosts))
        options = ["-F", "none", "-i", str(self.layout.identity), "-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes"]
        return subprocess.run(
            ["ssh", *options, "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=5", f"{user}@{host.address}", *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS,
        )  # fmt: skip

    def mend(self) -> None:
        """Give every host its power and its cable, and let it go on."""
        for host in self.hosts:
            if running.first_process(host) is None:
                running.power_on(host, wait=False)
            running.plug(host, plugged=True)
            running.freeze(host, frozen=False)
        for host in self.hosts:
            running.await_sshd(host)


def eventually(look: Callable[[], T], *, seconds: float = WAIT_SECONDS) -> T:
    """First true answer of `look`, or its last one."""
    deadline = time.monotonic() + seconds
    while not (answer := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer
