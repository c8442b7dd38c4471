"""Table 2 of peers.py: faults done to real jobs of two pods on an embedded cluster of its own, which goes with the block.

All ranks run a script that writes a line every 50 ms into a folder that both nodes share: this machine's clock tells who runs, whatever a
status says. The script exits as soon as it is asked to stop, so nobody waits for a grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.operator_scale import reason, say
from bench.peers.controlplane import SYSTEMS as WITHOUT_NODES
from bench.peers.controlplane import System, jobset_job, trainer_job, until_gone
from bench.peers.figures import JOBSET, LOCKSTEP, TRAINER, Life, Object, conditions, life, outcome, running, spread
from bench.peers.install import JOBSET_MANAGER, TORCH_RUNTIME, TRAINER_MANAGER, Installed, Manager, created_at_last
from lockstep.api.files.yamltext import load_yaml
from lockstep.api.names import API_VERSION
from lockstep.cli.clusters.devcluster import bring_up
from lockstep.devcluster.host.layout import NUMBER, default_layout
from lockstep.devcluster.images import BASE
from lockstep.kube.cluster import Cluster
from lockstep_machine.network import free_ports
from support.clusters.control_plane import connected
from support.clusters.installed_operator import install, local_objects
from support.clusters.own_cluster import NUMBERS, own_number

NODES = 2
VICTIM = "1"
STEADY_SECONDS = 3.0
START_SECONDS = 120.0
PATIENCE_SECONDS = 60.0
UNNOTICED_SECONDS = 30.0
"""Limit for a hang and an image: three times Lockstep's step limit here."""
LASTING_SECONDS = 2.0
"""Time for which restarted processes must run on; the status has followed by then."""
ALONE_SECONDS = 5.0
"""The others that still run so long after the victim came back aren't going to be restarted."""
HANG_SECONDS = 10
NO_IMAGE = "localhost/none:9"
SCRIPT = r"""
import json, os, pathlib, signal, socket, sys, time

rank = os.environ.get("RANK") or os.environ["JOB_COMPLETION_INDEX"]
folder = pathlib.Path("/workspace", os.environ["PEERS_JOB"])
order = folder / f"order-{rank}"
beats = (folder / f"{rank}-{time.time():.3f}").open("a", buffering=1)
report = None
if "LOCKSTEP_REPORT_SOCKET" in os.environ:
    report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(75 if report else 143))
step = 0
while True:
    beats.write(f"{time.time():.3f}\n")
    if order.exists():
        what = order.read_text()
        order.unlink()
        print("giving up", flush=True)
        beats.write(f"{what} {time.time():.3f}\n")
        if what == "exit":
            sys.exit(1)
        time.sleep(1e6)
    step += 1
    if report and step % 10 == 0:
        report.send(json.dumps({"rank": int(rank), "event": "step", "step": step // 10, "totalSteps": 100000}).encode())
    time.sleep(0.05)
"""
VOLUMES: list[Object] = [
    {"name": "scripts", "configMap": {"name": "scripts"}},
    {"name": "workspace", "persistentVolumeClaim": {"claimName": "ml-dev-workspace"}},
]
MOUNTS: list[Object] = [{"name": "scripts", "mountPath": "/scripts"}, {"name": "workspace", "mountPath": "/workspace"}]
COMMAND = ["python3", "/scripts/beat.py"]
CLAIMS = (
    ("ml-dev-workspace", "local-rwx", "ReadWriteMany"),
    ("ml-datasets", "local-rwx", "ReadWriteMany"),
    ("lockstep-python", "local-python", "ReadOnlyMany"),
)
Make = Callable[[str, str, str], Object]


def _variables(name: str) -> list[Object]:
    return [{"name": "PEERS_JOB", "value": name}]


def real_lockstep_job(name: str, namespace: str, image: str) -> Object:
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
    spec = {
        "cluster": "local", "nodes": NODES, "script": {"path": COMMAND[1]}, "env": _variables(name), "image": image,
        "hangTimeouts": {"stepSeconds": HANG_SECONDS}, "podTemplate": {"volumes": [volume]},
    }  # fmt: skip
    return {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def without_backoff(name: str, namespace: str, image: str) -> Object:
    job = real_lockstep_job(name, namespace, image)
    job["spec"]["restart"] = {"backoffSeconds": 0}
    return job


def real_jobset(name: str, namespace: str, image: str) -> Object:
    job = jobset_job(name, namespace, NODES)
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["volumes"] = VOLUMES
    pod["containers"][0] |= {"image": image, "command": COMMAND, "env": _variables(name), "volumeMounts": MOUNTS}
    return job


def real_trainjob(name: str, namespace: str, image: str) -> Object:
    job = trainer_job(name, namespace, NODES)
    job["spec"]["runtimeRef"]["kind"] = "TrainingRuntime"
    job["spec"]["trainer"] |= {"image": image, "command": COMMAND, "env": _variables(name)}
    return job


def runtime(shipped: Path, namespace: str) -> Object:
    """The shipped `torch-distributed`, with the volumes that the script needs."""
    item: Object = load_yaml(shipped.read_text())
    item |= {"kind": "TrainingRuntime", "metadata": {**item["metadata"], "namespace": namespace}}
    pod = item["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["volumes"] = VOLUMES
    pod["containers"][0] |= {"image": BASE, "volumeMounts": MOUNTS}
    return item


@dataclass(frozen=True)
class Case:
    """A system, and how its jobs look."""

    label: str
    system: System
    make: Make


MAKES: dict[str, Make] = {LOCKSTEP: real_lockstep_job, JOBSET: real_jobset, TRAINER: real_trainjob}
CASES = tuple(Case(system.name, system, MAKES[system.name]) for system in WITHOUT_NODES)
LOCKSTEP_WITHOUT_BACKOFF = replace(CASES[0], label=f"{LOCKSTEP}, backoffSeconds 0", make=without_backoff)


class Stage:
    """The cluster, and what was measured on it so far."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.samples: dict[str, dict[str, list[Object]]] = {}

    def shared(self, case: Case) -> Path:
        """The host's view of the folder that its pods see as /workspace."""
        return default_layout().volumes / case.system.namespace / "ml-dev-workspace"

    def lives(self, case: Case, name: str) -> list[Life]:
        files = [path for path in (self.shared(case) / name).iterdir() if not path.name.startswith("order")]
        return [one for one in (life(path.name, path.read_text()) for path in files) if one]

    def add(self, what: str, case: Case, **sample: Any) -> None:
        self.samples.setdefault(what, {}).setdefault(case.label, []).append(sample)
        say(
            f"{what}, {case.label}:"
            f" { {name: round(value, 2) if isinstance(value, float) else value for name, value in sample.items() if name != 'said'} }"
        )

    async def status(self, case: Case, name: str) -> Object:
        return (await self.cluster.request("GET", case.system.path(name))).get("status") or {}

    async def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if holds():
                return True
            await asyncio.sleep(0.05)
        return False


async def prepare(cluster: Cluster, case: Case) -> None:
    """A namespace with what its pods mount."""
    namespace = case.system.namespace
    await cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    await cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "ml-dev-sa", "namespace": namespace}})
    scripts = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "scripts", "namespace": namespace},
        "data": {"beat.py": SCRIPT},
    }
    await cluster.create(scripts)
    for name, storage_class, mode in CLAIMS:
        spec = {"accessModes": [mode], "storageClassName": storage_class, "resources": {"requests": {"storage": "1Gi"}}}
        await cluster.create(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": namespace}, "spec": spec}
        )


@contextlib.asynccontextmanager
async def stage(kubeconfig: Path, built: Path, folder: Path) -> AsyncIterator[Stage]:
    """The embedded cluster with all three systems, Lockstep's operator in a pod as `lockstep deploy local` has it."""
    managers: list[Manager] = []
    async with await connected(kubeconfig) as cluster:
        there = Stage(cluster)
        try:
            await install(cluster, local_objects())
            for peer in (JOBSET_MANAGER, TRAINER_MANAGER):
                managers.append(await Installed(peer, built, *free_ports(2)).run(cluster, kubeconfig, folder))
            for case in CASES:
                await prepare(cluster, case)
            namespace = CASES[-1].system.namespace
            await created_at_last(
                cluster,
                f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainingruntimes",
                runtime(built / TORCH_RUNTIME, namespace),
            )
            yield there
        finally:
            for manager in managers:
                manager.end()


@contextlib.asynccontextmanager
async def job(there: Stage, case: Case, name: str, image: str = BASE) -> AsyncIterator[float]:
    """Create a job, yield the time of the request, and delete the job after the block."""
    await there.until(there.shared(case).exists, START_SECONDS)  # the first time, claims are bound by then
    folder = there.shared(case) / name
    folder.mkdir()
    folder.chmod(0o777)
    asked = time.time()
    await there.cluster.request("POST", case.system.path(), case.make(name, case.system.namespace, image))
    try:
        yield asked
    finally:
        await there.cluster.request("DELETE", case.system.path(name), {"propagationPolicy": "Background"})
        await until_gone(there.cluster, case.system)


async def started(there: Stage, case: Case, name: str, asked: float) -> None:
    """All of its processes run, for a while. Their start is a sample, too."""
    if not await there.until(lambda: bool(running(there.lives(case, name), time.time(), NODES)), START_SECONDS):
        raise SystemExit(f"{case.label}: {name} doesn't run: {conditions(await there.status(case, name))}")
    there.add("start", case, all_run=max(one.began for one in there.lives(case, name)) - asked)
    await asyncio.sleep(STEADY_SECONDS)
    for _ in range(100):  # the status of Lockstep's follows its coordinator's next report
        if case.system.name != LOCKSTEP or reason({"status": await there.status(case, name)}) == "Running":
            return
        await asyncio.sleep(0.2)


async def strike(there: Stage, case: Case, name: str, fault: str) -> float:
    """Do it to rank 1; when it was done."""
    if fault == "delete":
        pod = await _pod_of(there.cluster, case.system, VICTIM)
        asked = time.time()
        await there.cluster.delete("Pod", case.system.namespace, pod, grace_seconds=0)
        return asked
    (there.shared(case) / name / f"order-{VICTIM}").write_text(fault)

    def obeyed() -> list[float]:
        return [one.obeyed for one in there.lives(case, name) if one.obeyed is not None]

    if not await there.until(lambda: bool(obeyed()), START_SECONDS):
        raise SystemExit(f"{case.label}: {name} doesn't do as it is told")
    return obeyed()[0]


async def _pod_of(cluster: Cluster, system: System, rank: str) -> str:
    for pod in (await cluster.list("Pod", system.namespace))["items"]:
        labels = pod["metadata"]["labels"]
        if rank in (labels.get("batch.kubernetes.io/job-completion-index"), labels.get("apps.kubernetes.io/pod-index")):
            return str(pod["metadata"]["name"])
    raise SystemExit(f"{system.name} has no pod of rank {rank}")


async def suffer(there: Stage, case: Case, name: str, fault: str) -> None:
    """One fault, and what becomes of the job."""
    async with job(there, case, name) as asked:
        await started(there, case, name, asked)
        before = set(conditions(await there.status(case, name)))
        struck = await strike(there, case, name, fault)
        said: dict[str, None] = {}
        end = time.time() + (UNNOTICED_SECONDS if fault == "hang" else PATIENCE_SECONDS)
        while True:
            lives, now = there.lives(case, name), time.time()
            found = outcome(lives, VICTIM, struck, now)
            alone = found.victim_again is not None and found.survivor_stopped is None and now - struck - found.victim_again > ALONE_SECONDS
            said |= dict.fromkeys(line for line in conditions(await there.status(case, name)) if line not in before)
            ran_since = struck + found.all_run_again if found.all_run_again is not None else now
            if now - ran_since > LASTING_SECONDS or alone or now > end:
                there.add(fault, case, **vars(found), said=list(said))
                return
            await asyncio.sleep(0.1)


async def wrong_image(there: Stage, case: Case, name: str) -> None:
    """Return True if the status says so."""
    async with job(there, case, name, NO_IMAGE) as asked:
        while (seconds := time.time() - asked) < UNNOTICED_SECONDS:
            lines = conditions(await there.status(case, name))
            if any(NO_IMAGE in line for line in lines):
                there.add("image", case, after=seconds, said=[line for line in lines if NO_IMAGE in line])
                return
            await asyncio.sleep(0.2)
        there.add("image", case, after=None, said=lines)


def figures(samples: dict[str, dict[str, list[Object]]]) -> Object:
    """Figures of all runs, for every fault and system."""
    result: Object = {
        "start": {label: {"all_run": spread([sample["all_run"] for sample in found])} for label, found in samples.get("start", {}).items()}
    }
    for fault, by_label in samples.items():
        if fault != "start":
            result[fault] = {label: _of_fault(found) for label, found in by_label.items()}
    return result


def _of_fault(found: list[Object]) -> Object:
    names = [name for name in found[0] if name != "said"]
    values = {name: [sample[name] for sample in found if sample[name] is not None] for name in names}
    return {**{name: spread(value) if value else None for name, value in values.items()}, "n": len(found), "said": found[0]["said"]}


async def measure(there: Stage, runs: int, slow_runs: int) -> Object:
    for case in CASES:  # what is new to a node is fetched, code is compiled
        async with job(there, case, "warm") as asked:
            await started(there, case, "warm", asked)
    there.samples.clear()
    for number in range(runs):
        for fault in ("exit", "delete"):
            for case in (CASES[0], LOCKSTEP_WITHOUT_BACKOFF, *CASES[1:]) if fault == "exit" else CASES:
                backoff = "" if case is not LOCKSTEP_WITHOUT_BACKOFF else "b"
                await suffer(there, case, f"{fault}{number}{backoff}", fault)
    for number in range(slow_runs):
        for case in CASES:
            await suffer(there, case, f"hang{number}", "hang")
            await wrong_image(there, case, f"image{number}")
    return figures(there.samples)


@contextlib.contextmanager
def own_cluster() -> Iterator[Path]:
    """The kubeconfig of an embedded cluster that is nobody else's, of the number in $LOCKSTEP_DEVCLUSTER if that is set."""
    numbers = [default_layout().index] if NUMBER in os.environ else NUMBERS
    with own_number(numbers), contextlib.redirect_stdout(sys.stderr):
        yield bring_up(NODES)


def measure_faults(built: Path, runs: int, slow_runs: int) -> Object:
    """Measure, by fault and system, the seconds until the survivor was stopped, and until all ran again. `slow_runs` are for faults that
    the peers don't notice.
    """

    async def measured(kubeconfig: Path, folder: Path) -> Object:
        async with stage(kubeconfig, built, folder) as there:
            return await measure(there, runs, slow_runs)

    with tempfile.TemporaryDirectory() as name, own_cluster() as kubeconfig:
        return asyncio.run(measured(kubeconfig, Path(name)))
