""".venv/bin/python tests/bench/sync.py --json: how long it takes until an edit is in the pods, beside `kubectl cp` and tar through exec.

Two pods of their own on the cluster of $KUBECONFIG (else the embedded one), each with a volume of its own; 1,000 files of 4 kB, as in a
checkout. In turn, round after round, each until both pods have it:

lockstep    `lockstep sync`, as a process, as it is typed
watch       `lockstep sync --watch`, which runs already: from the save of the file until the pods have said so
kubectl cp  the real kubectl's, of the whole folder, to one pod after the other: it takes one
tar         `tar | kubectl exec -- tar` of the whole folder, to both pods at once, as `oc rsync --strategy=tar` does to one

unchanged_seconds, small_change_seconds (one file of 4 kB), first_seconds (all files); medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PODS = 2
FILES = 1000
FILE_BYTES = 4096
JOB = "bench-sync"
HERE = Path(__file__).resolve().parent
LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))


def timed(act: Callable[[], None]) -> float:
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def tar_to_all(kubectl: list[str], namespace: str, folder: Path, target: str) -> None:
    """Copy as `kubectl cp` and `oc rsync --strategy=tar` do, to both pods at once."""
    waiting = []
    for node in range(PODS):
        packing = subprocess.Popen(["tar", "cf", "-", "-C", str(folder), "."], stdout=subprocess.PIPE)
        unpack = ["sh", "-c", f"mkdir -p {target} && tar xmf - -C {target}"]
        command = [*kubectl, "exec", "-i", "-n", namespace, f"{JOB}-{node}", "-c", "trainer", "--", *unpack]
        waiting += [packing, subprocess.Popen(command, stdin=packing.stdout)]
    for process in waiting:
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, process.args)


def make_folders(kubectl: list[str], namespace: str, target: str) -> None:
    """`kubectl cp` wants them, and makes none; not timed."""
    for node in range(PODS):
        run(*kubectl, "exec", "-n", namespace, f"{JOB}-{node}", "-c", "trainer", "--", "mkdir", "-p", target)


def kubectl_cp(kubectl: list[str], namespace: str, folder: Path, target: str) -> None:
    for node in range(PODS):
        run(*kubectl, "cp", "-n", namespace, "-c", "trainer", f"{folder}/.", f"{JOB}-{node}:{target}")


def save(folder: Path, text: str) -> None:
    """Save as editors do: never half of a file."""
    draft = folder / "d0" / ".f0.swp"
    draft.write_text(f"{text}\n" * 100)
    draft.replace(folder / "d0" / "f0.py")


def measure_watch(namespace: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure from the end of the write until the watch has printed that both pods have it."""
    command = [LOCKSTEP, "sync", JOB, str(folder), "--to", "/workspace/watch", "-n", namespace, "--watch"]
    found: list[float] = []
    begun: float | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for turn in range(rounds + 1):
                told = [process.stdout.readline() for _ in range(PODS)]
                if not all(" sent (" in line for line in told):
                    raise SystemExit(f"the watch says {told}")
                if begun is not None:
                    found.append(time.monotonic() - begun)
                time.sleep(0.5 + 0.037 * turn)  # not in step with its looks
                save(folder, f"watch {turn}")
                begun = time.monotonic()
        finally:
            process.terminate()
    return {"name": "watch", "pods": PODS, "files": FILES, "small_change_seconds": round(statistics.median(found), 3)}


def measure(kubectl: list[str], namespace: str, rounds: int) -> list[dict[str, Any]]:
    samples: dict[str, dict[str, list[float]]] = {way: {} for way in ("lockstep", "kubectl cp", "tar")}
    with tempfile.TemporaryDirectory(prefix="sync-bench-") as name:
        folder = Path(name)
        for number in range(FILES):
            (folder / f"d{number % 20}").mkdir(exist_ok=True)
            (folder / f"d{number % 20}" / f"f{number}.py").write_text(f"{number:07}\n" * (FILE_BYTES // 8))

        def lockstep(target: str) -> None:
            run(LOCKSTEP, "sync", JOB, str(folder), "--to", target, "-n", namespace)

        ways = {
            "lockstep": lockstep,
            "kubectl cp": lambda target: kubectl_cp(kubectl, namespace, folder, target),
            "tar": lambda target: tar_to_all(kubectl, namespace, folder, target),
        }
        for turn in range(rounds):
            for way, act in ways.items() if turn % 2 == 0 else reversed(ways.items()):
                target = f"/workspace/{way.replace(' ', '-')}-{turn}"
                make_folders(kubectl, namespace, target)
                found = samples[way]
                found.setdefault("first_seconds", []).append(timed(lambda act=act, target=target: act(target)))  # type: ignore[misc]
                found.setdefault("unchanged_seconds", []).append(timed(lambda act=act, target=target: act(target)))  # type: ignore[misc]
                save(folder, f"{way} {turn}")
                found.setdefault("small_change_seconds", []).append(timed(lambda act=act, target=target: act(target)))  # type: ignore[misc]
        watched = measure_watch(namespace, folder, rounds)
    return [
        watched,
        *(
            {"name": way, "pods": PODS, "files": FILES, **{k: round(statistics.median(v), 3) for k, v in found.items()}}
            for way, found in samples.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    from kubernetes import client, config, dynamic

    from lockstep.cli.clusters.deploy import install_cluster
    from lockstep.cli.clusters.deploymentplan import Mode
    from lockstep.cli.clusters.devcluster import bring_up
    from lockstep.cli.shared.places import Verb
    from lockstep.devcluster import binary
    from lockstep.environments import cache_root
    from support.clusters.cluster_jobs import prepare

    os.environ.setdefault("KUBECONFIG", str(bring_up()))
    install_cluster(Verb(), "local", Mode.AUTO)
    kubectl = [str(binary.folder(cache_root()) / binary.MULTI_CALL), "kubectl"]
    with config.new_client_from_config(os.environ["KUBECONFIG"]) as connection:
        core = client.CoreV1Api(connection)
        namespace = core.create_namespace({"metadata": {"generateName": "lockstep-bench-"}}).metadata.name
        try:
            jobs = prepare(dynamic.DynamicClient(connection), namespace)
            jobs.start(JOB, storage={"mode": "PerPod"})
            jobs.until_running(JOB)
            results = measure(kubectl, namespace, options.rounds)
        finally:
            core.delete_namespace(namespace)
    if options.json:
        print(json.dumps({"results": results, "machine": {"cpus": os.cpu_count(), "loadAverage": os.getloadavg()[0]}}, indent=1))
    else:
        for result in results:
            print(result)


if __name__ == "__main__":
    main()
