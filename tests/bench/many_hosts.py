"""Seconds that a check and a start of many hosts take:

.venv/bin/python tests/bench/many_hosts.py --hosts 32 --json

Three real hosts of this machine, each with a systemd, an sshd and a disk (root), and on them many users, each with an address of its own and listed as a host. In turn:

check     `lockstep hosts check`: all facts, a knock of every host at every other one, and the bandwidth between neighbors
again     the same, over connections that are open
start     `lockstep run --detach` of a script with one rank on each: until all ranks run

The agents and ranks of all hosts share this machine's processors, so real hosts are faster: the load is told beside the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from lockstep.devcluster.hosts.bed import up  # noqa: E402
from support.clusters.bed_hosts import BedHosts  # noqa: E402
from support.clusters.bed_jobs import Crowd  # noqa: E402
from support.clusters.own_cluster import own_bed  # noqa: E402

BEDS = 3
SECONDS = 600.0


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return round(time.monotonic() - begun, 2)


def measure(laptop: Crowd) -> dict[str, float]:
    """Seconds of each part."""
    check = ["hosts", "check", str(laptop.cluster)]
    path = laptop.crowded_job("crowded", steps=100_000)
    figures = {
        "check": seconds_of(lambda: laptop.type(*check, check=False, seconds=SECONDS)),
        "again": seconds_of(lambda: laptop.type(*check, check=False, seconds=SECONDS)),
        "start": seconds_of(lambda: laptop.type("run", "-f", str(path), "--cluster", str(laptop.cluster), "--detach", seconds=SECONDS)),
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
