"""An operator that talks to the API server through a proxy that fails it, the pieces of a job's life that it does so in, and what each
leaves.

The API server, its controllers and the operator's process are real; pods and coordinator are played (played_job.py), so that hundreds of
faults fit into minutes. tests/cluster/operator/life/test_faults_training.py has real pods and ranks.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, dynamic

from lockstep.api.names import OPERATOR_NAME, REPORT_URL, TLS_SECRET
from lockstep_gang.contract.report import State
from lockstep_machine.network import free_ports
from support.clusters.cluster_jobs import Jobs, kubeconfig_of_account, prepare, token_in, until
from support.clusters.control_plane import Objects, Plane, default_objects
from support.clusters.fault_proxy import Fault, FaultProxy, Write
from support.clusters.operator_process import OperatorProcess
from support.clusters.played_job import JOB, NODES, PlayedJob

SYSTEM = "lockstep-system"
QUIET_SECONDS = 0.4
REFERENCE_SECONDS = 1.5
EQUAL_SECONDS = 60.0
"""The operator may have to list again to know of what was deleted while there was none."""
LOG_CHARACTERS = 8000


@dataclass
class Rig:
    """An installation on a control plane, and its operator in a process that reaches it through the proxy."""

    api: dynamic.DynamicClient
    proxy: FaultProxy
    operator: OperatorProcess
    port: int
    ca_pem: str
    folder: Path
    settings: dict[str, str]
    plane: Plane
    audited: int
    """Bytes of the audit log that are older than this rig."""

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        """Return the first result that is true, and start an operator again that ended by itself meanwhile."""

        def revived() -> Any:
            self.operator.revive()
            return look()

        return until(what, revived)

    @contextmanager
    def job(self, namespace: str = "") -> Iterator[PlayedJob]:
        """Make a job in a namespace of its own, unless one is named, so that no run sees what another left."""
        core = client.CoreV1Api(self.api.client)
        namespace = namespace or core.create_namespace({"metadata": {"generateName": "lockstep-fault-"}}).metadata.name
        job = PlayedJob(
            prepare(self.api, namespace),
            self.port,
            self.ca_pem,
            self.folder,
            self.operator.revive,
            self.proxy.wait,
            report_url=self.settings.get("LOCKSTEP_REPORT_URL", REPORT_URL),
        )
        try:
            yield job
        finally:
            self.proxy.arm("", {})
            job.end()


@contextmanager
def rig_in(folder: Path, plane: Plane, objects: Objects = default_objects, system: str = SYSTEM, **more: str) -> Iterator[Rig]:
    """Its operator has the rights of its own service account in namespace `system`, as `objects` give them; `more`: of its environment."""
    plane.install(objects())
    audited = plane.audit_log.stat().st_size
    with config.new_client_from_config(str(plane.kubeconfig)) as connection:
        api = dynamic.DynamicClient(connection)
        play_nodes(client.CoreV1Api(connection))
        own = kubeconfig_of_account(OPERATOR_NAME, Jobs(api, system), plane.kubeconfig, folder / "operator.kubeconfig")
        with FaultProxy(own).running() as proxy:
            assert isinstance(proxy, FaultProxy)
            port = free_ports(1)[0]
            settings = {
                "KUBECONFIG": str(proxy.kubeconfig(folder, token_in(own))), "LOCKSTEP_AGENT_IMAGE": "agent:1",
                    "LOCKSTEP_REPORT_PORT": str(port),
                "LOCKSTEP_METRICS_PORT": "0", **more,
            }  # fmt: skip
            try:
                with operator_process(settings, folder) as process:
                    until("the certificate", lambda: Jobs(api, system).get("Secret", TLS_SECRET))
                    ca_pem = Jobs(api, system).secret(TLS_SECRET, "ca.crt").decode()
                    yield Rig(api, proxy, process, port, ca_pem, folder, settings, plane, audited)
            finally:
                plane.forget_operator(system)


@contextmanager
def operator_process(settings: dict[str, str], folder: Path) -> Iterator[OperatorProcess]:
    process = OperatorProcess(settings, folder / "operator.log")
    try:
        process.start()
        yield process
    finally:
        process.close()


def play_nodes(core: client.CoreV1Api) -> None:
    """Nodes without a kubelet, for pods that the test binds to them. No controller looks after nodes here, so they stay Ready."""
    ready = {"type": "Ready", "status": "True", "reason": "Played", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    room = {"cpu": "64", "memory": "256Gi", "pods": "110"}
    for name in NODES:
        try:
            core.create_node({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
        except client.ApiException as error:
            if error.status != 409:  # it is there
                raise
        core.patch_node(name, {"spec": {"taints": None}})  # not ready, as every new node
        core.patch_node_status(name, {"status": {"conditions": [ready], "capacity": room, "allocatable": room}})


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


def pulling(job: PlayedJob) -> None:
    """No rank ever runs: the image that spec or cluster names isn't there."""
    job.image = "right:1"
    job.create()
    job.until("an image that can't be pulled", lambda: job.jobs.condition(JOB, "RanksReady").get("reason") == "ImagePullFailed")


def ends_as(state: State) -> Callable[[PlayedJob], None]:
    def act(job: PlayedJob) -> None:
        job.state = state

    return act


def is_complete(job: PlayedJob) -> bool:
    stateful_set = job.jobs.get("StatefulSet", JOB, "apps/v1") or {}
    return job.is_("Complete") and stateful_set["spec"]["replicas"] == 0 and not job.uids("Pod") and f"{JOB}-log" in job.uids("ConfigMap")


def is_failed(job: PlayedJob) -> bool:
    return job.is_("Failed") and not job.uids("Pod")


def is_resized(job: PlayedJob) -> bool:
    return job.nodes == 3 and job.runs() and len(job.uids("Pod")) == 3


def is_without_node_one(job: PlayedJob) -> bool:
    return job.attempt == 2 and job.runs() and [pod["spec"].get("nodeName") for pod in job.jobs.pods(JOB)] == [NODES[0], NODES[2]]


def is_gone(job: PlayedJob) -> bool:
    return not job.jobs.job(JOB) and not any(map(job.uids, ("StatefulSet", "Pod", "Secret", "Service")))


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("create", nothing, PlayedJob.create, PlayedJob.runs),
        Scenario("restart", running, PlayedJob.fail_and_start_again, PlayedJob.runs),
        Scenario("suspend", running, lambda job: job.jobs.change(JOB, suspend=True), is_suspended),
        Scenario("resume", suspended, lambda job: job.jobs.change(JOB, suspend=False), PlayedJob.runs),
        Scenario("resize", running, lambda job: job.jobs.change(JOB, nodes=3), is_resized),
        Scenario("correct", pulling, lambda job: job.jobs.change(JOB, image="right:1"), PlayedJob.runs),
        Scenario("exclude", running, PlayedJob.find_node_one_bad, is_without_node_one),
        Scenario("complete", running, ends_as(State.COMPLETE), is_complete),
        Scenario("fail", running, ends_as(State.FAILED), is_failed),
        Scenario("delete", running, lambda job: job.jobs.end(JOB), is_gone),
    )
}


@dataclass(frozen=True)
class Told:
    """State that one run left, with the number of its writes and of its faults."""

    state: str
    steps: int
    faults: int


def tell(rig: Rig, scenario: Scenario, faults: dict[int, Fault], reference: str | None, events: bool = True) -> Told:
    """Play it once with these faults, as far as they come. Asserts what must hold in every run. `events`: they are part of the state."""
    with rig.job() as job:
        scenario.prepare(job)
        settled(rig, job)
        pods, claims = job.uids("Pod"), job.uids("PersistentVolumeClaim")
        rig.proxy.arm(job.jobs.namespace, faults)
        scenario.act(job)
        try:
            job.until(scenario.name, lambda: scenario.is_done(job))
        except AssertionError as error:
            log = (rig.folder / "operator.log").read_text(errors="replace")
            pytest.fail(f"{error}\n{written(rig)}\n{log[-LOG_CHARACTERS:]}")
        settled(rig, job, REFERENCE_SECONDS if reference is None else QUIET_SECONDS)
        end = time.monotonic() + EQUAL_SECONDS
        while (state := job.state_of_everything(events)) != reference and reference is not None and time.monotonic() < end:
            settled(rig, job)
        if reference not in (None, state):
            pytest.fail(f"{scenario.name}, {written(rig)}:\n{difference(reference or '', state)}")
        assert made_twice(rig.proxy.writes) == []
        assert claims.items() <= job.uids("PersistentVolumeClaim").items()
        assert scenario.name != "restart" or job.uids("Pod") == pods
        return Told(state, rig.proxy.steps, len(faults) - rig.proxy.left)


def written(rig: Rig) -> str:
    return ", ".join(f"{w.method} {w.path.rpartition('/namespaces/')[2].partition('/')[2]} {w.name} {w.status}" for w in rig.proxy.writes)


def difference(reference: str, state: str) -> str:
    return "\n".join(difflib.unified_diff(reference.splitlines(), state.splitlines(), "reference", "state", lineterm="", n=4))


def settled(rig: Rig, job: PlayedJob, seconds: float = QUIET_SECONDS) -> None:
    """Wait until nothing is written any more."""

    def count() -> int:
        return len(rig.proxy.writes)

    seen, since = count(), time.monotonic()
    while time.monotonic() - since < seconds:
        job.tick()
        rig.proxy.wait(0.1)
        if count() != seen:
            seen, since = count(), time.monotonic()


def made_twice(writes: list[Write]) -> list[tuple[str, str]]:
    """Children that were created more than once."""
    made = [(w.path, w.name) for w in writes if w.method == "POST" and w.is_committed and not w.path.endswith("/events")]
    return [child for child in made if made.count(child) > 1]
