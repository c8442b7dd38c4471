"""The operator is killed at each of its writes, and its writes go wrong: what is left afterwards is always the same.

The API server, its controllers and the operator's process are real; pods and coordinator are played (tests/played_job.py), so that hundreds of
faults fit into minutes. tests/cluster/operator/test_faults_training.py has real pods and ranks.
"""

from __future__ import annotations

import difflib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kubernetes import client, dynamic
from kubernetes.client.exceptions import ApiException

from cluster_jobs import Jobs, prepare, until
from fault_proxy import Fault, FaultProxy, Write
from lockstep_gang.contract import State
from operator_process import OperatorProcess
from played_job import JOB, NODE, PlayedJob

CHECKOUT = Path(__file__).resolve().parents[3]
SYSTEM = "lockstep-system"
QUIET_SECONDS = 0.4
REFERENCE_SECONDS = 2.0
EQUAL_SECONDS = 20.0
HEARTBEAT_SECONDS = 5.0
WRITES_MAX = 40


@dataclass
class Rig:
    """The cluster without its own operator, and one in a process that talks to the API server through the proxy."""

    api: dynamic.DynamicClient
    proxy: FaultProxy
    operator: OperatorProcess
    port: int
    ca_pem: str
    folder: Path
    settings: dict[str, str]

    @contextmanager
    def job(self) -> Iterator[PlayedJob]:
        """In a namespace of its own: what one run leaves is not there in the next."""
        core = client.CoreV1Api(self.api.client)
        namespace = core.create_namespace({"metadata": {"generateName": "lockstep-fault-"}}).metadata.name
        job = PlayedJob(prepare(self.api, namespace), self.port, self.ca_pem, self.folder, self.operator.revive)
        try:
            yield job
        finally:
            self.proxy.arm("", {})
            job.jobs.end(JOB)
            job.until("the job is gone", lambda: is_gone(job))
            core.delete_namespace(namespace)


@pytest.fixture(scope="module")
def rig(cluster: Path, api: dynamic.DynamicClient, operator: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("faults")
    core = client.CoreV1Api(api.client)
    with operator_away(api), played_node(core), FaultProxy(cluster).running() as proxy:
        assert isinstance(proxy, FaultProxy)
        port = free_port()
        settings = {"KUBECONFIG": str(proxy.kubeconfig(folder)), "LOCKSTEP_AGENT_IMAGE": "agent:1", "LOCKSTEP_REPORT_PORT": str(port)}
        with operator_process(settings, folder) as process:
            until("the certificate", lambda: Jobs(api, SYSTEM).get("Secret", "lockstep-operator-tls"))
            ca_pem = Jobs(api, SYSTEM).secret("lockstep-operator-tls", "ca.crt").decode()
            yield Rig(api, proxy, process, port, ca_pem, folder, settings)


@contextmanager
def operator_process(settings: dict[str, str], folder: Path) -> Iterator[OperatorProcess]:
    process = OperatorProcess(settings, folder / "operator.log")
    try:
        process.start()
        yield process
    finally:
        process.close()


@contextmanager
def operator_away(api: dynamic.DynamicClient) -> Iterator[None]:
    """The replicas in pods stand aside."""
    apps, system = client.AppsV1Api(api.client), Jobs(api, SYSTEM)

    def scale(replicas: int) -> None:
        apps.patch_namespaced_deployment_scale("lockstep-operator", SYSTEM, {"spec": {"replicas": replicas}})

    def pods() -> int:
        label = "app.kubernetes.io/component=operator"
        return len(system.kind("Pod").get(namespace=SYSTEM, label_selector=label).to_dict()["items"])

    scale(0)
    try:
        until("the operator's pods are gone", lambda: pods() == 0, 60)
        yield
    finally:
        scale(2)
        until("the operator is back", lambda: apps.read_namespaced_deployment("lockstep-operator", SYSTEM).status.ready_replicas == 2, 90)


@contextmanager
def played_node(core: client.CoreV1Api) -> Iterator[None]:
    """A node without a kubelet, for pods that the test binds to it; the scheduler leaves it alone. It says that it is Ready, as a kubelet would."""
    node = {"metadata": {"name": NODE}, "spec": {"unschedulable": True}}
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_SECONDS):
            say_ready(core)

    beating = threading.Thread(target=beat)
    try:
        core.create_node(node)
        say_ready(core)
        beating.start()
        yield
    finally:
        over.set()
        if beating.is_alive():
            beating.join()
        try:
            core.delete_node(NODE)
        except ApiException as error:
            assert error.status == 404, error


def say_ready(core: client.CoreV1Api) -> None:
    now = datetime.now(UTC).isoformat()
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Played",
        "message": "",
        "lastHeartbeatTime": now,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    core.patch_node_status(NODE, {"status": {"conditions": [ready]}})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Scenario:
    """A piece of a job's life: what happens, and how its end is seen."""

    name: str
    prepare: Callable[[PlayedJob], None]
    act: Callable[[PlayedJob], None]
    is_done: Callable[[PlayedJob], bool]


def nothing(job: PlayedJob) -> None:
    del job


def running(job: PlayedJob) -> None:
    job.create()
    job.until("running", job.runs)


def suspended(job: PlayedJob) -> None:
    running(job)
    job.jobs.change(JOB, suspend=True)
    job.until("suspended", lambda: is_suspended(job))


def is_suspended(job: PlayedJob) -> bool:
    return job.is_("Suspended") and not job.uids("Pod")


def complete(job: PlayedJob) -> None:
    job.state = State.COMPLETE


def is_complete(job: PlayedJob) -> bool:
    stateful_set = job.jobs.get("StatefulSet", JOB, "apps/v1") or {}
    return job.is_("Complete") and stateful_set["spec"]["replicas"] == 0 and not job.uids("Pod") and f"{JOB}-log" in job.uids("ConfigMap")


def fail(job: PlayedJob) -> None:
    job.state = State.FAILED


def is_failed(job: PlayedJob) -> bool:
    return job.is_("Failed") and not job.uids("Pod")


def is_gone(job: PlayedJob) -> bool:
    return not job.jobs.job(JOB) and not job.uids("StatefulSet") and not job.uids("Pod") and not job.uids("Secret")


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("create", nothing, PlayedJob.create, PlayedJob.runs),
        Scenario("restart", running, PlayedJob.fail_and_start_again, PlayedJob.runs),
        Scenario("suspend", running, lambda job: job.jobs.change(JOB, suspend=True), is_suspended),
        Scenario("resume", suspended, lambda job: job.jobs.change(JOB, suspend=False), PlayedJob.runs),
        Scenario("complete", running, complete, is_complete),
        Scenario("fail", running, fail, is_failed),
        Scenario("delete", running, lambda job: job.jobs.end(JOB), is_gone),
    )
}


@dataclass(frozen=True)
class Told:
    """What one run left, and what was written for it."""

    state: str
    writes: tuple[Write, ...]


def tell(rig: Rig, scenario: Scenario, faults: dict[int, Fault], reference: str | None) -> Told | None:
    """Play it once with these faults; None when it was over before they came. Asserts what must hold in every run."""
    with rig.job() as job:
        scenario.prepare(job)
        settled(rig, job)
        pods, claims = job.uids("Pod"), job.uids("PersistentVolumeClaim")
        rig.proxy.arm(job.jobs.namespace, faults)
        scenario.act(job)
        job.until(scenario.name, lambda: scenario.is_done(job))
        settled(rig, job, REFERENCE_SECONDS if reference is None else QUIET_SECONDS)
        end = time.monotonic() + EQUAL_SECONDS
        while (state := job.state_of_everything()) != reference and reference is not None and time.monotonic() < end:
            settled(rig, job)
        if reference not in (None, state):
            pytest.fail(f"{scenario.name} with {faults}:\n{difference(reference or '', state)}")
        assert made_twice(rig.proxy.writes) == []
        assert claims.items() <= job.uids("PersistentVolumeClaim").items()
        assert scenario.name != "restart" or job.uids("Pod") == pods
        told = Told(state, tuple(rig.proxy.writes))
        return told if rig.proxy.is_over else None


def difference(reference: str, state: str) -> str:
    return "\n".join(difflib.unified_diff(reference.splitlines(), state.splitlines(), "reference", "state", lineterm="", n=4))


def settled(rig: Rig, job: PlayedJob, seconds: float = QUIET_SECONDS) -> None:
    """Until nothing is written any more."""

    def count() -> int:
        return len(rig.proxy.writes)

    seen, since = count(), time.monotonic()
    while time.monotonic() - since < seconds:
        job.tick()
        time.sleep(0.02)
        if count() != seen:
            seen, since = count(), time.monotonic()


def made_twice(writes: list[Write]) -> list[tuple[str, str]]:
    """Children that were created more than once."""
    made = [(w.path, w.name) for w in writes if w.method == "POST" and w.is_committed and not w.path.endswith("/events")]
    return [child for child in made if made.count(child) > 1]


@pytest.mark.parametrize("name", ["create", "restart"])
def test_killed_at_each_write_it_reaches_the_same_state(rig: Rig, name: str) -> None:
    scenario = SCENARIOS[name]
    reference = tell(rig, scenario, {}, None)
    assert reference is not None
    kills = 0
    for number, side in itertools.product(range(WRITES_MAX), ("before", "after")):
        told = tell(rig, scenario, {number: Fault(**{side: rig.operator.start})}, reference.state)
        if told is None:
            break
        kills += 1
    print(f"{name}: {len(reference.writes)} writes, {kills} kills")
    assert kills >= 2 * (len(reference.writes) - 1)
