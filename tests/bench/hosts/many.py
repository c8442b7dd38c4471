"""Seconds that a check and a start of many hosts take:

.venv/bin/python tests/bench/hosts/many.py --hosts 32 --json

Three real hosts of this machine, each with a systemd, an sshd and a disk (root), and on them many users, each with an address of its own
and listed as a host. In turn:

check     `lockstep doctor`: all facts, a knock of every host at every other one, and the bandwidth between neighbors
again     the same, over connections that are open
start     `lockstep run --detach` of a script with one rank on each: until all ranks run

All hosts share this machine's processors, and whatever else it does: so each part also has the processor seconds of the laptop's command
with its ssh processes, and those of all hosts together. A laptop with 32 real hosts spends only the first, and each host a 32nd of the
second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from lockstep.devcluster.host import cgroups  # noqa: E402
from lockstep.devcluster.hosts.bed import up  # noqa: E402
from support.clusters.bed_hosts import BedHosts  # noqa: E402
from support.clusters.bed_jobs import Crowd  # noqa: E402
from support.clusters.own_cluster import own_bed  # noqa: E402

BEDS = 3
SECONDS = 600.0


def host_seconds(bed: BedHosts) -> float:
    """Processor seconds of everything that has run on the hosts."""
    unified = cgroups.unified()
    assert unified is not None, "the hosts are in such groups"
    lines = [line.split() for host in bed.hosts for line in (unified / host.cgroup / "cpu.stat").read_text().splitlines()]
    return sum(int(value) for name, value in lines if name == "usage_usec") / 1e6


def laptop_seconds() -> float:
    """Processor seconds of the commands that have ended, and of the ssh processes that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds_of(bed: BedHosts, work: Callable[[], object]) -> dict[str, float]:
    """Seconds of the work: by the clock, and of processors."""
    laptop, hosts, begun = laptop_seconds(), host_seconds(bed), time.monotonic()
    work()
    figures = {"seconds": time.monotonic() - begun, "laptop": laptop_seconds() - laptop, "hosts": host_seconds(bed) - hosts}
    return {name: round(value, 1) for name, value in figures.items()}


def measure(laptop: Crowd) -> dict[str, dict[str, float]]:
    """Seconds of each part."""
    check = ["doctor", str(laptop.cluster)]
    path = laptop.crowded_job("crowded", steps=100_000)
    figures = {
        "check": seconds_of(laptop.bed, lambda: laptop.type(*check, check=False, seconds=SECONDS)),
        "again": seconds_of(laptop.bed, lambda: laptop.type(*check, check=False, seconds=SECONDS)),
        "start": seconds_of(
            laptop.bed, lambda: laptop.type("run", "-f", str(path), "--cluster", str(laptop.cluster), "--detach", seconds=SECONDS)
        ),
    }
    laptop.about("stop", "crowded", "--now")
    laptop.about("delete", "crowded", "--yes")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
    try:
        with own_bed() as layout:
            up(layout, BEDS, lambda line: print(line, file=sys.stderr))
            with Crowd(BedHosts(layout, BEDS), folder, options.hosts) as laptop:
                load = round(os.getloadavg()[0], 1)
                figures = {"hosts": options.hosts, "processors": os.cpu_count(), "load": load, **measure(laptop)}
    finally:
        shutil.rmtree(folder)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:10} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
