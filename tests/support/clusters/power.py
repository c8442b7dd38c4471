"""Power, cable and lid of the bed's hosts."""

from __future__ import annotations

import time

from lockstep.devcluster.host import network
from lockstep.devcluster.hosts import bed
from lockstep.devcluster.hosts.layout import HostLayout


def power_off(host: HostLayout) -> None:
    """Take its power: nothing in it is told, its disk stays as it is, and no packet leaves it."""
    plug(host, plugged=False)
    if bed.first_process(host) is not None:
        freeze(
            host, frozen=True
        )  # else one would see another one die first, and the kernel would send what it says of that once it is plugged in
    bed.end(host)


def power_on(host: HostLayout, *, wait: bool = True) -> None:
    """Boot it again, as after `power_off`. Raises BedError when its sshd doesn't answer."""
    bed.start(host, [host.bed.host(number) for number in bed.numbers(host.bed)])
    if wait:
        bed.await_sshd(host)


def freeze(host: HostLayout, *, frozen: bool) -> None:
    """Stop every process of it, or let them go on: a laptop whose lid is shut. Raises BedError when some don't stop."""
    group = bed.group_of(host)
    (group / "cgroup.freeze").write_text("1" if frozen else "0")
    deadline = time.monotonic() + bed.GROUP_SECONDS
    while f"frozen {int(frozen)}" not in (group / "cgroup.events").read_text():
        if time.monotonic() > deadline:
            raise bed.BedError(
                f"{host.name} did not {'freeze' if frozen else 'thaw'} in {bed.GROUP_SECONDS:.0f} s (see {group}/cgroup.events)"
            )
        time.sleep(bed.POLL_SECONDS)


def plug(host: HostLayout, *, plugged: bool) -> None:
    """Pull its cable, or put it in again."""
    network.run("ip", "link", "set", host.link, "up" if plugged else "down")
