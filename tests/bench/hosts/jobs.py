"""Measure a job on hosts over ssh, on a bed of this machine that is brought up for it and removed afterwards; root:

.venv/bin/python tests/bench/hosts/jobs.py --runs 5 --json

Commands are typed as at a laptop, with connections that are open; medians over the runs. Then all hosts lose their power at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lockstep.devcluster.hosts import bed as running
from support.clusters import bed_hosts
from support.clusters.bed_hosts import BedHosts
from support.clusters.bed_jobs import BedJobs
from support.clusters.own_cluster import own_bed

HOSTS = 3
PATIENCE_SECONDS = 180.0
ALL_RUN, LOOK, NOTHING, CHECK, BACK = (
    "run --detach on two hosts, until it has said that all ranks run",
    "get on three hosts",
    "help words: the command itself",
    "doctor of three hosts",
    "all hosts rebooted: from the last sshd's answer to the next step of every rank",
)


class Laptop(BedJobs):
    """A laptop whose verbs are processes, as a person's are."""

    type = BedJobs.start


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def one_round(laptop: BedJobs, path: Path) -> dict[str, float]:
    """Seconds of each command, one after the other."""
    there = ("--cluster", str(laptop.cluster))
    found = {
        NOTHING: seconds_of(lambda: laptop.type("help", "words")),
        ALL_RUN: seconds_of(lambda: laptop.run(path)),
        LOOK: seconds_of(lambda: laptop.type("get", *there)),
    }
    laptop.about("delete", "bench", "--yes")
    laptop.forget("bench")
    return {**found, CHECK: seconds_of(lambda: laptop.type("doctor", str(laptop.cluster), check=False))}


def after_power_loss(laptop: BedJobs, path: Path) -> float:
    """Seconds from the last sshd's answer until every rank has done its next step, after all hosts lost their power at once."""
    laptop.run(path)
    until(lambda: min(counts(laptop)) > 3)
    for host in laptop.bed.hosts:
        bed_hosts.power_off(host)
    before = counts(laptop)
    for host in laptop.bed.hosts:
        bed_hosts.power_on(host, wait=False)
    for host in laptop.bed.hosts:
        running.await_sshd(host)
    begin = time.monotonic()
    until(lambda: all(now > then for now, then in zip(counts(laptop), before, strict=True)))
    seconds = time.monotonic() - begin
    laptop.about("delete", "bench", "--yes")
    return seconds


def counts(laptop: BedJobs) -> list[int]:
    """Steps of both ranks, by the files on the hosts' disks."""
    return [laptop.count(number, number) for number in (0, 1)]


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"the job does not go on for {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="rounds that are measured")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    with own_bed() as layout, tempfile.TemporaryDirectory() as folder:
        running.up(layout, HOSTS, lambda words: print(words, file=sys.stderr))
        laptop = Laptop(BedHosts(layout, HOSTS), Path(folder))
        path = laptop.job("bench")
        rounds = [one_round(laptop, path) for _ in range(options.runs + 1)][1:]  # (the first opens the connections)
        figures = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        figures |= {BACK: after_power_loss(laptop, path), "load average": os.getloadavg()[0]}
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:80} {value:6.2f}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
