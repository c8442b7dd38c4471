""".venv/bin/python tests/bench/peers/run.py --json (make bench-peers): Lockstep, JobSet and Kubeflow Trainer side by side, as they ship, on
this machine. Root.

Both peers are built from their Go modules, once; webhooks are on. Two tables, and Lockstep's goals with what was measured for them:

Without nodes (controlplane.py): real etcd, API server and controller manager. One job after the other, the systems in turns, all
controllers running: apply → first pod, → all pods   from before the POST of a job until a watch sees its pods writes          by the API
server's audit log, to the job's namespace, until nothing more is written; own: by the system's controllers, else by the controller manager
own CPU, API server's           of the processes in that time, a job A burst of jobs of two nodes from eight clients, each system by itself:
PSS             of the system's controllers with so many jobs whose pods exist; of Trainer, JobSet's with it jobs/s          until all pods
of the burst exist; CPU until nothing more is written

With real pods (faults.py): an embedded cluster of two nodes, of the number in $LOCKSTEP_DEVCLUSTER or one that is free, made for it and
removed. By heartbeats of the processes: survivor stopped        from the fault of rank 1 until rank 0 has ended; all run again: until the
last process has begun of those that run together again create → all processes  from before the POST until the last process has begun

`--quick` takes a few minutes and says roughly the same; `--only sizes` measures a part.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0] = __file__.rsplit("/", 3)[0]  # tests/ has what it stands on

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence

from bench.operator_scale import say
from bench.peers.controlplane import measure_bursts, measure_sizes
from bench.peers.faults import measure_faults
from bench.peers.figures import Object, goals, tables
from bench.peers.install import PEERS, build
from lockstep.environments import cache_root

PARTS = ("sizes", "burst", "faults")


def sizes(text: str) -> list[tuple[int, int]]:
    """2:40,16:30 as [(2, 40), (16, 30)]."""
    return [(int(nodes), int(runs)) for nodes, _, runs in (item.partition(":") for item in text.split(",") if item)]


def numbers(text: str) -> list[int]:
    return sorted(map(int, filter(None, text.split(","))))


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=sizes, help="nodes:runs of each system, separated by commas (2:40,16:30,64:30)")
    parser.add_argument("--burst", type=numbers, help="how many jobs there are after each burst, separated by commas (200,1000)")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="measure only these parts")
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True, help="real pods on an embedded cluster, too")
    parser.add_argument("--runs", type=int, help="of exit and deletion (5); hangs and images that are not there: 1, with --quick none")
    parser.add_argument("--quick", action="store_true", help="few runs: minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    given.sizes = given.sizes if given.sizes is not None else sizes("2:8,16:5,64:4" if given.quick else "2:40,16:30,64:30")
    given.burst = given.burst if given.burst is not None else numbers("200" if given.quick else "200,1000")
    given.runs = given.runs or (1 if given.quick else 5)
    return given


def measure(given: argparse.Namespace, result: Object) -> None:
    """Put what was measured into `result`, part by part."""
    built = build(cache_root(), say)
    result |= {
        "began": time.strftime("%F %T"),
        "cores": os.cpu_count(),
        "versions": {peer.name: peer.version for peer in PEERS},
    }
    parts: dict[str, Callable[[], Object]] = {
        "sizes": lambda: measure_sizes(built, given.sizes),
        "burst": lambda: measure_bursts(built, given.burst),
        "faults": lambda: measure_faults(built, given.runs, 0 if given.quick else 1),
    }
    for name in PARTS:
        if name in given.only and (name != "faults" or given.faults):
            before = os.getloadavg()[0]
            result[name] = parts[name]()
            result.setdefault("load", {})[name] = [before, os.getloadavg()[0]]


def show(result: Object, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**result, "goals": [vars(goal) for goal in goals(result)]}, indent=1))
        return
    print(tables(result))
    print("\n" + "\n".join(map(str, goals(result))))


def main() -> None:
    given = options()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # everything that was started is ended then, too
    result: Object = {}
    try:
        measure(given, result)
    finally:  # half an hour's figures aren't lost with a later part
        show(result, given.json)


if __name__ == "__main__":
    main()
