"""Hosts of the tests' bed: what a test does to them, and what a person on the laptop types."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lockstep.devcluster.host import cgroups, network
from lockstep.devcluster.hosts import bed as running
from lockstep.devcluster.hosts.layout import BedLayout, HostLayout

WAIT_SECONDS = 180.0
FREEZE_SECONDS = 10.0
IFF_UP = 1
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
NVIDIA_SMI = """#!/usr/bin/python3
import sys
MEMORY = {"memory.total": "81559", "memory.used": "4", "pci.bus_id": "00000000:%02X:00.0", "mig.mode.current": "Disabled"}
OTHERS = {"name": "NVIDIA H100 80GB HBM3", "driver_version": "570.86.15", "compute_cap": "9.0"}
KNOWN = {"index": "%d", "uuid": "GPU-00000000-0000-4000-8000-%012d", **MEMORY, **OTHERS}
fields = next((word.partition("=")[2].split(",") for word in sys.argv if word.startswith("--query-gpu=")), [])
for number in range(COUNT):
    values = [KNOWN.get(field, "0") for field in fields]
    if fields:
        print(", ".join(value % number if "%" in value else value for value in values))
    elif sys.argv[1:] == ["-L"]:
        print(f"GPU {number}: {KNOWN['name']} (UUID: {KNOWN['uuid'] % number})")
"""
"""An nvidia-smi of a host with so many GPUs, which are idle. It finds no program on them."""
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

    def sent(self) -> int:
        """Bytes that this machine itself has sent to the hosts: what they send each other only passes its bridge."""
        return int(Path(f"/sys/class/net/{self.layout.bridge}/statistics/tx_bytes").read_text())

    @contextmanager
    def pretended_gpus(self, count: int) -> Iterator[None]:
        """Let every host show so many GPUs meanwhile, by nvidia-smi and as devices. They compute nothing."""
        put = (
            f"cat > /usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi; for n in $(seq 0 {count - 1}); do touch /dev/nvidia$n;"
            " done"
        )
        try:
            for host in self.hosts:
                self.console(host.number, "sh", "-ec", put, stdin=NVIDIA_SMI.replace("COUNT", str(count)).encode())
            yield
        finally:
            for host in self.hosts:
                self.console(host.number, "sh", "-c", "rm -f /usr/local/bin/nvidia-smi /dev/nvidia[0-9]*")

    def mend(self) -> None:
        """Give every host that lost its power, its cable or its time what it lost, and wait until all let people in."""
        for host in self.hosts:
            if _is_well(host):
                continue
            if running.first_process(host) is None:
                power_on(host, wait=False)
            plug(host, plugged=True)
            freeze(host, frozen=False)
        for host in self.hosts:
            running.await_sshd(host)


def _is_well(host: HostLayout) -> bool:
    """Return True if the host has power, its cable is in, and it isn't frozen."""
    groups = cgroups.unified()
    assert groups is not None
    plugged = int(Path("/sys/class/net", host.link, "flags").read_text(), 16) & IFF_UP
    return bool(running.first_process(host) and plugged) and (groups / host.cgroup / "cgroup.freeze").read_text() == "0\n"


def limit(device: str, rate: str, burst: str = "64kb") -> None:
    """Let no more than this through a network device of this machine, from now on."""
    network.run("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")


@contextmanager
def limited(rate: str, *devices: str, burst: str = "64kb") -> Iterator[None]:
    """Let no more than this through the devices meanwhile."""
    for device in devices:
        limit(device, rate, burst)
    try:
        yield
    finally:
        for device in devices:
            network.run("tc", "qdisc", "del", "dev", device, "root")


def eventually(look: Callable[[], T], *, seconds: float = WAIT_SECONDS) -> T:
    """First true answer of `look`, or its last one. Looks come less often the longer it takes: what is looked at needs the processor,
    too.
    """
    deadline, pause = time.monotonic() + seconds, 0.05
    while not (answer := look()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)
    return answer


def power_off(host: HostLayout) -> None:
    """Take its power: nothing in it is told, its disk stays as it is, and no packet leaves it."""
    plug(host, plugged=False)
    if running.first_process(host) is not None:
        freeze(
            host, frozen=True
        )  # else one would see another one die first, and the kernel would send what it says of that once it is plugged in
    running.end(host)


def power_on(host: HostLayout, *, wait: bool = True) -> None:
    """Boot it again, as after `power_off`. Raises BedError when its sshd doesn't answer."""
    running.start(host, [host.bed.host(number) for number in running.numbers(host.bed)])
    if wait:
        running.await_sshd(host)


def freeze(host: HostLayout, *, frozen: bool) -> None:
    """Stop every process of it, or let them go on: a laptop whose lid is shut. Raises BedError when some don't stop."""
    group = running.group_of(host)
    (group / "cgroup.freeze").write_text("1" if frozen else "0")
    deadline = time.monotonic() + FREEZE_SECONDS
    while f"frozen {int(frozen)}" not in (group / "cgroup.events").read_text():
        if time.monotonic() > deadline:
            raise running.BedError(
                f"{host.name} did not {'freeze' if frozen else 'thaw'} in {FREEZE_SECONDS:.0f} s (see {group}/cgroup.events)"
            )
        time.sleep(running.POLL_SECONDS)


def plug(host: HostLayout, *, plugged: bool) -> None:
    """Pull its cable, or put it in again."""
    network.run("ip", "link", "set", host.link, "up" if plugged else "down")
