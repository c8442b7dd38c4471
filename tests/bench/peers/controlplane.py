"""Table 1 of peers.py: a control plane without nodes, where a pod has started once a watch sees it.

The three systems run at once, one job at a time, in turns; in a burst only one system runs, in a control plane of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.operator_scale import OperatorUnderTest, job_of, megabytes, say
from bench.peers.figures import JOBSET, LOCKSTEP, OWN, TRAINER, Object, count_writes, percentiles, writes_per_job
from bench.peers.install import JOBSET_MANAGER, TORCH_RUNTIME, TRAINER_MANAGER, Installed, Manager, created_at_last, identity
from lockstep.api.files.yamltext import load_yaml
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.kube.cluster import Cluster
from lockstep.kube.kinds import path_of
from lockstep_machine.network import free_ports
from support.clusters.control_plane import AUDIT_LOG, connected, control_plane

OPERATOR = "lockstep"
OPERATOR_ACCOUNT = (OPERATOR_NAMESPACE, OPERATOR_NAME)
SETTLED_SECONDS = 0.5
CREATORS = 8
PODS_OF_BURST = 2
WARM_UP_ROUNDS = 3
START_SECONDS = 120.0


def lockstep_job(name: str, namespace: str, nodes: int) -> Object:
    return job_of(name, namespace, nodes=nodes)


def jobset_job(name: str, namespace: str, nodes: int) -> Object:
    """One indexed Job, all of it anew when a pod fails: what comes closest to a gang."""
    pod = {"spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "i", "command": ["python3", "/scripts/x.py"]}]}}
    job = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "backoffLimit": 0, "template": pod}
    spec = {"failurePolicy": {"maxRestarts": 3}, "replicatedJobs": [{"name": "w", "replicas": 1, "template": {"spec": job}}]}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def trainer_job(name: str, namespace: str, nodes: int) -> Object:
    """TrainJob of the runtime `torch-distributed`, as shipped."""
    trainer = {"numNodes": nodes, "image": "i", "command": ["torchrun", "/scripts/x.py"]}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


@dataclass(frozen=True)
class System:
    """One of the three: its API, and the controllers that serve it."""

    name: str
    api: str
    plural: str
    make: Callable[[str, str, int], Object]
    controllers: tuple[str, ...]
    leaves: tuple[str, ...]
    """Paths of what has to be gone after a job was deleted, below the namespace's."""

    @property
    def namespace(self) -> str:
        return f"peers-{self.plural}"

    def path(self, name: str = "") -> str:
        return f"/apis/{self.api}/namespaces/{self.namespace}/{self.plural}" + (f"/{name}" if name else "")

    def leftovers(self) -> list[str]:
        paths = [f"/{root}/namespaces/{self.namespace}/{plural}" for root, _, plural in (leaf.rpartition("/") for leaf in self.leaves)]
        return [path_of("Pod", self.namespace), self.path(), *paths]


JOBS, JOBSETS = "apis/batch/v1/jobs", "apis/jobset.x-k8s.io/v1alpha2/jobsets"
SYSTEMS = (
    System(LOCKSTEP, "lockstep.dev/v1alpha1", "trainingjobs", lockstep_job, (OPERATOR,), ("apis/apps/v1/statefulsets",)),
    System(JOBSET, "jobset.x-k8s.io/v1alpha2", "jobsets", jobset_job, (JOBSET_MANAGER.name,), (JOBS,)),
    System(TRAINER, "trainer.kubeflow.org/v1alpha1", "trainjobs", trainer_job, (TRAINER_MANAGER.name, JOBSET_MANAGER.name),
        (JOBS, JOBSETS)),
)  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """Processor seconds of all threads of a process, to the nanosecond (clock_getcpuclockid)."""
    return time.clock_gettime(~pid << 3 | 2)


class Audit:
    """The API server's log of what service accounts did, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open()
        self._file.seek(0, os.SEEK_END)
        self._rest = ""

    def lines(self) -> list[str]:
        """Lines since the last call."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        return lines

    async def until_settled(self, system: System, users: frozenset[str], seconds: float = SETTLED_SECONDS) -> Counter[str]:
        """All writes to its namespace, once there were none for a while."""
        counts: Counter[str] = Counter()
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < seconds:
            await asyncio.sleep(0.1)
            if new := count_writes(self._about(system), system.namespace, users):
                counts += new
                quiet_since = time.monotonic()
        return counts

    def _about(self, system: System) -> Iterator[str]:
        return (line for line in self.lines() if system.namespace in line)

    def close(self) -> None:
        self._file.close()


class Pods:
    """Times at which a watch saw the pods of each job."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}
        self.total = 0
        self._changed = asyncio.Event()

    async def watch(self, cluster: Cluster, namespace: str) -> None:
        version = (await cluster.list("Pod", namespace))["metadata"]["resourceVersion"]
        async for event in cluster.watch("Pod", namespace, {"resourceVersion": version}):
            if event["type"] == "ADDED":
                self.seen.setdefault(event["object"]["metadata"]["name"].partition("-")[0], []).append(time.monotonic())
                self.total += 1
                self._changed.set()

    async def until(self, holds: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


class Plane:
    """A control plane with the controllers that run on it."""

    def __init__(self, cluster: Cluster, kubeconfig: Path, built: Path, folder: Path) -> None:
        self.cluster = cluster
        self.audit = Audit(kubeconfig.parent / AUDIT_LOG)
        self._kubeconfig, self._folder = kubeconfig, folder
        self._installed = {peer.name: Installed(peer, built, *free_ports(2)) for peer in (JOBSET_MANAGER, TRAINER_MANAGER)}
        self._running: dict[str, OperatorUnderTest | Manager] = {}
        self._api_server = _pid_of("kube-apiserver", kubeconfig.parent)
        self._torch_runtime = load_yaml((built / TORCH_RUNTIME).read_text())

    async def start(self, controllers: Sequence[str]) -> None:
        for name in controllers:
            if name == OPERATOR:
                config = await identity(self.cluster, self._kubeconfig, OPERATOR_ACCOUNT, self._folder / "kubeconfig-lockstep")
                operator = self._running[name] = OperatorUnderTest(config, free_ports(1)[0], self._folder / "lockstep.log")
                async with asyncio.timeout(START_SECONDS):
                    await operator.until_synced(self.cluster)
                continue
            self._running[name] = await self._installed[name].run(self.cluster, self._kubeconfig, self._folder)
        if TRAINER_MANAGER.name in controllers:
            await created_at_last(self.cluster, "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes", self._torch_runtime)

    def users(self, system: System) -> frozenset[str]:
        """Names of its controllers in the audit log."""
        accounts = [OPERATOR_ACCOUNT if name == OPERATOR else self._installed[name].peer.account for name in system.controllers]
        return frozenset(f"system:serviceaccount:{namespace}:{name}" for namespace, name in accounts)

    def cpu(self, system: System) -> tuple[float, float]:
        """Seconds that its own processes have used, and the API server."""
        return sum(cpu_seconds(self._running[name].pid) for name in system.controllers), cpu_seconds(self._api_server)

    def memory_mb(self, system: System) -> dict[str, float]:
        return {name: megabytes(self._running[name].pid) for name in system.controllers}

    def end(self) -> None:
        self.audit.close()
        for running in reversed(self._running.values()):
            running.end()


def _pid_of(program: str, folder: Path) -> int:
    """The one that has the folder in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            arguments = path.read_text().split("\0")
            if program in arguments and any(str(folder) in argument for argument in arguments):
                return int(path.parent.name)
    raise SystemExit(f"{program} of {folder} doesn't run")


@contextlib.asynccontextmanager
async def plane(kubeconfig: Path, built: Path, folder: Path, systems: Sequence[System]) -> AsyncIterator[Plane]:
    """Yield a control plane with namespaces for these systems, and their controllers; all of them end with the block."""
    async with await connected(kubeconfig) as cluster:
        there = Plane(cluster, kubeconfig, built, folder)
        try:
            for system in systems:
                await cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system.namespace}})
                for account in ("default", "ml-dev-sa"):
                    metadata = {"name": account, "namespace": system.namespace}
                    await cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
            await there.start(list(dict.fromkeys(name for system in systems for name in reversed(system.controllers))))
            yield there
        finally:
            there.end()


@dataclass
class Runs:
    """Measurements of one system at one size."""

    first: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    api_server: list[float] = field(default_factory=list)
    writes: Counter[str] = field(default_factory=Counter)

    def figures(self) -> Object:
        jobs = len(self.all)
        cpu = {name: round(1000 * statistics.fmean(values), 1) for name, values in ((OWN, self.own), ("api_server", self.api_server))}
        return {
            "first_pod_ms": percentiles(self.first), "all_pods_ms": percentiles(self.all), "cpu_ms": cpu,
                "writes": writes_per_job(self.writes, jobs),
        }  # fmt: skip


async def start_one(there: Plane, system: System, pods: Pods, name: str, nodes: int, runs: Runs | None) -> None:
    """One job from its POST until it is gone. Without `runs` it is for warming up."""
    own, api_server = there.cpu(system)
    asked = time.monotonic()
    await there.cluster.request("POST", system.path(), system.make(name, system.namespace, nodes))
    await pods.until(lambda: len(pods.seen.get(name, ())) >= nodes, START_SECONDS)
    writes = await there.audit.until_settled(system, there.users(system))
    own_after, api_server_after = there.cpu(system)
    if runs is not None:
        seen = pods.seen[name]
        runs.first.append(seen[0] - asked)
        runs.all.append(seen[nodes - 1] - asked)
        runs.own.append(own_after - own)
        runs.api_server.append(api_server_after - api_server)
        runs.writes += writes
    await there.cluster.request("DELETE", system.path(name), {"propagationPolicy": "Background"})
    await until_gone(there.cluster, system)
    await there.audit.until_settled(system, there.users(system), 0.2)


async def until_gone(cluster: Cluster, system: System) -> None:
    end = time.monotonic() + START_SECONDS
    for path in system.leftovers():
        while (await cluster.request("GET", path, query={"limit": "1"}))["items"]:
            if time.monotonic() > end:
                raise SystemExit(f"{path} isn't empty {START_SECONDS:.0f} s after the job was deleted")
            await asyncio.sleep(0.05)


async def in_turns(there: Plane, sizes: Sequence[tuple[int, int]]) -> Object:
    watched = {system.name: Pods() for system in SYSTEMS}
    watching = [asyncio.create_task(watched[system.name].watch(there.cluster, system.namespace)) for system in SYSTEMS]
    await asyncio.sleep(1)
    result: Object = {}
    try:
        for nodes, rounds in sizes:
            runs = {system.name: Runs() for system in SYSTEMS}
            warm_up = 1 if result else WARM_UP_ROUNDS
            load = []
            for number in range(-warm_up, rounds):
                for place in range(len(SYSTEMS)):
                    system = SYSTEMS[(number + place) % len(SYSTEMS)]  # nobody always comes after the same one
                    name = f"n{nodes}r{number + warm_up}"
                    await start_one(there, system, watched[system.name], name, nodes, runs[system.name] if number >= 0 else None)
                load.append(os.getloadavg()[0])
            result[str(nodes)] = {name: measured.figures() for name, measured in runs.items()}
            for name, figures in result[str(nodes)].items():
                say(
                    f"{nodes} nodes, {name}: all pods {figures['all_pods_ms']}, own CPU {figures['cpu_ms'][OWN]} ms, writes"
                    f" {figures['writes']['total']}"
                )
    finally:
        for task in watching:
            task.cancel()
    return result


def measure_sizes(built: Path, sizes: Sequence[tuple[int, int]]) -> Object:
    """Measure, by nodes and system, apply → pods, CPU and writes of one job's start."""

    async def measured(kubeconfig: Path, folder: Path) -> Object:
        async with plane(kubeconfig, built, folder, SYSTEMS) as there:
            return await in_turns(there, sizes)

    with tempfile.TemporaryDirectory() as name, control_plane(_made(name, "plane")) as kubeconfig:
        return asyncio.run(measured(kubeconfig, Path(name)))


def _made(folder: str, name: str) -> Path:
    path = Path(folder, name)
    path.mkdir()
    return path


async def burst(there: Plane, system: System, counts: Sequence[int]) -> Object:
    pods = Pods()
    watching = asyncio.create_task(pods.watch(there.cluster, system.namespace))
    await asyncio.sleep(5)
    result: Object = {"0": _memory(there, system)}
    try:
        there_are = 0
        for count in counts:
            own, api_server = there.cpu(system)
            began = time.monotonic()
            await _create(there.cluster, system, range(there_are, count))
            await pods.until(lambda count=count: pods.total >= PODS_OF_BURST * count, 600)
            seconds = time.monotonic() - began
            await there.audit.until_settled(system, there.users(system), 3)
            own_after, api_server_after = there.cpu(system)
            jobs = count - there_are
            cpu = {OWN: round(1000 * (own_after - own) / jobs, 1), "api_server": round(1000 * (api_server_after - api_server) / jobs, 1)}
            figures = {"seconds": round(seconds, 1), "jobs_per_second": round(jobs / seconds, 1), "cpu_ms": cpu, **_memory(there, system)}
            result[str(count)] = figures
            say(f"burst of {jobs}, {system.name}: {figures}")
            there_are = count
    finally:
        watching.cancel()
    return result


def _memory(there: Plane, system: System) -> Object:
    """PSS: of all of its controllers, and of each."""
    each = there.memory_mb(system)
    return {"memory_mb": round(sum(each.values()), 1), "memory_mb_each": each}


async def _create(cluster: Cluster, system: System, numbers: range) -> None:
    """Create the jobs, so many at once."""
    waiting = iter(numbers)

    async def creator() -> None:
        for number in waiting:
            await cluster.request("POST", system.path(), system.make(f"b{number}", system.namespace, PODS_OF_BURST))

    await asyncio.gather(*(creator() for _ in range(CREATORS)))


def measure_bursts(built: Path, counts: Sequence[int]) -> Object:
    """Measure, by system and number of jobs, PSS, and the time and CPU of the jobs since the count before."""

    async def measured(system: System, kubeconfig: Path, folder: Path) -> Object:
        async with plane(kubeconfig, built, folder, [system]) as there:
            return await burst(there, system, counts)

    result: dict[str, Any] = {}
    for system in SYSTEMS:
        with tempfile.TemporaryDirectory() as name, control_plane(_made(name, "plane")) as kubeconfig:
            result[system.name] = asyncio.run(measured(system, kubeconfig, Path(name)))
    return result
