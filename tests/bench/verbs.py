""".venv/bin/python tests/bench/verbs.py --json: what a verb takes beside `kubectl get`, on an embedded cluster that is up and has an
operator.

    make cluster-up && make deploy-cluster CLUSTER=local && .venv/bin/python tests/bench/verbs.py --json

Two script jobs of two nodes are made, one that runs and one that has ended, and removed at the end. Each round types every command once, in
turn.

seconds, p95   from the start of the process to its end
processor      user and system seconds of the process: what is left of a busy machine's influence
first_line     until the first byte of its output, standard error too: nobody should look at nothing for long
floor          a Python that does nothing, and one that imports what every verb on a cluster stands on (typer with pydantic, asyncio with
TLS,
               aiohttp, YAML): no verb can take less
"""

from __future__ import annotations

import argparse
import json
import math
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.devcluster.host.layout import default_layout

BIN = Path(sys.executable).parent
RUNS, ENDED = "bench-runs", "bench-ended"
PATIENCE_SECONDS = 120.0
STANDS_ON = "import typer._adapters, asyncio, ssl, aiohttp, yaml"
SCRIPTS = {
    "wait.py": "import time\nprint('waiting', flush=True)\nwhile True:\n    time.sleep(1)\n",
    "end.py": (
        "import os, pathlib, struct\nfor line in range(2000):\n    print('line', line, flush=True)\nfolder ="
        " pathlib.Path('/workspace/runs/bench-ended/adapter')\nfolder.mkdir(exist_ok=True)\n(folder /"
        " 'adapter_config.json').write_text('{}')\n(folder / 'adapter_model.safetensors').write_bytes(struct.pack('<Q', 2) + b'{}')\n"
    ),
}
LOCKSTEP = {
    "--help": "a page",
    "get --help": "a page",
    "cluster list": "no cluster",
    "get": "",
    f"get {RUNS}": "",
    f"describe {RUNS}": "",
    f"events {RUNS}": "",
    f"why {RUNS}": "",
    f"why {ENDED}": "",
    f"logs {RUNS}": "",
    f"logs {ENDED} --tail 5": "",
    f"logs {ENDED}": "by a reader pod",
    f"top {RUNS} --once": "looks at the nodes for a second",
    f"top {ENDED} --once": "",
    f"cp {ENDED}:/workspace/runs/{ENDED}/logs {{folder}}/logs": "by a reader pod",
    f"adapter get {ENDED} {{folder}}/adapter": "by a reader pod",
    "cluster status local": "",
    "doctor local": "",
    "validate -f manifests/samples/trainingjob.yaml": "no cluster",
    "plan -f manifests/samples/trainingjob.yaml": "",
    "deploy local --dry-run": "no cluster",
    "deploy local --diff": "",
}
"""Words after `lockstep`, and a note on them."""


@dataclass(frozen=True)
class Taken:
    """One run of a command, in seconds."""

    seconds: float
    first_line: float
    processor: float
    code: int


def run(command: list[str]) -> Taken:
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    first = 0.0
    with selectors.DefaultSelector() as streams:
        for stream in (process.stdout, process.stderr):
            streams.register(stream, selectors.EVENT_READ)
        while streams.get_map():
            for key, _ in streams.select():
                if not os.read(key.fd, 1 << 16):
                    streams.unregister(key.fileobj)
                elif not first:
                    first = time.monotonic() - began
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    process.stderr.close()
    return Taken(seconds, first or seconds, used.ru_utime + used.ru_stime, process.returncode)


def job(name: str, script: str) -> dict[str, Any]:
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "bench-scripts"}}
    spec = {"cluster": "local", "nodes": 2, "script": {"path": f"/scripts/{script}"}, "podTemplate": {"volumes": [volume]}}
    return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}


@contextmanager
def two_jobs(kubectl: list[str]) -> Iterator[None]:
    """One that runs, and one that has ended."""
    objects = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "bench-scripts"}, "data": SCRIPTS},
        job(RUNS, "wait.py"),
        job(ENDED, "end.py"),
    ]
    subprocess.run(
        [*kubectl, "apply", "-f", "-"], input="\n---\n".join(map(json.dumps, objects)), text=True, check=True, stdout=subprocess.DEVNULL
    )
    try:
        for name, reason in ((RUNS, "Running"), (ENDED, "Complete")):
            until(kubectl, name, reason)
        yield
    finally:
        for kind, names in (("trainingjobs", [RUNS, ENDED]), ("configmap", ["bench-scripts"])):
            subprocess.run([*kubectl, "delete", "--ignore-not-found", kind, *names], check=False, stdout=subprocess.DEVNULL)


def until(kubectl: list[str], name: str, reason: str) -> None:
    query = 'jsonpath={.status.conditions[?(@.type=="Progressing")].reason}'
    end = time.monotonic() + PATIENCE_SECONDS
    while (seen := subprocess.run([*kubectl, "get", "tj", name, "-o", query], capture_output=True, text=True, check=True).stdout) != reason:
        if time.monotonic() > end:
            raise SystemExit(f"{name} is not {reason} but {seen} after {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.5)


def commands(kubectl: list[str], folder: str) -> dict[str, list[str]]:
    """Commands by their names in the table."""
    floor = {"python: nothing": [sys.executable, "-c", "pass"], "python: imports": [sys.executable, "-c", STANDS_ON]}
    verbs = {
        words.replace("{folder}", "."): [str(BIN / "lockstep"), *(word.replace("{folder}", folder) for word in words.split())]
        for words in LOCKSTEP
    }
    return {**floor, "kubectl get tj": [*kubectl, "get", "tj"], **verbs}


def measure(rounds: int) -> dict[str, Any]:
    layout = default_layout()
    if not layout.kubeconfig.exists():
        raise SystemExit("no embedded cluster is up: make cluster-up && make deploy-cluster CLUSTER=local")
    os.environ["KUBECONFIG"] = str(layout.kubeconfig)
    program = sorted((layout.state.parent / "bin").glob("*/lockstep-kube"))[-1]
    kubectl = [str(program), "kubectl", "-n", "lockstep"]
    with two_jobs(kubectl), tempfile.TemporaryDirectory() as folder:
        typed = commands(kubectl, folder)
        taken: dict[str, list[Taken]] = {name: [] for name in typed}
        for number in range(-1, rounds):  # the first writes bytecode and fills the page cache
            for name, command in typed.items():
                one = run(command)
                if number >= 0:
                    taken[name].append(one)
    notes = {words.replace("{folder}", "."): note for words, note in LOCKSTEP.items()}
    return {
        "rounds": rounds,
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "results": [{"name": name, **figures(found), "note": notes.get(name, "")} for name, found in taken.items()],
    }


def figures(found: list[Taken]) -> dict[str, Any]:
    """Medians, and the time that 95 of 100 runs stay below."""
    seconds = sorted(one.seconds for one in found)
    return {
        "seconds": round(statistics.median(seconds), 3),
        "p95": round(seconds[math.ceil(0.95 * len(seconds)) - 1], 3),
        "first_line": round(statistics.median(one.first_line for one in found), 3),
        "processor": round(statistics.median(one.processor for one in found), 3),
        "codes": sorted({one.code for one in found}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure verbs on the embedded cluster that is up.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    report = measure(options.rounds)
    if options.json:
        print(json.dumps(report))
        return
    print(f"{report['rounds']} rounds, {report['cores']} cores, load {report['load'][0]}")
    for one in report["results"]:
        print(f"{one['name']:50} {one['seconds']:6.2f} s  p95 {one['p95']:5.2f}  first line {one['first_line']:5.2f}  CPU"
              f" {one['processor']:5.2f}  {one['codes']} {one['note']}")  # fmt: skip


if __name__ == "__main__":
    main()
