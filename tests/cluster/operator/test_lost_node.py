"""A node dies without a word. The longest test of all: Kubernetes takes 40 to 50 s to believe it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from kubernetes import client

from cluster_jobs import Jobs, until
from cluster_nodes import cut_power, third_node
from lockstep.devcluster.layout import NodeLayout

NOT_READY_SECONDS = 90.0
AGAIN_SECONDS = 90.0
LOST = 1
"""The node of the job; 0, which takes the coordinator along, passes as well, and would take two minutes more."""
STEPS = """
import json, os, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
reports.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
for step in range(1, 100000):
    reports.send(json.dumps({"rank": int(os.environ["RANK"]), "event": "step", "step": step}).encode())
    time.sleep(0.2)
"""


@pytest.fixture
def core(jobs: Jobs) -> client.CoreV1Api:
    return client.CoreV1Api(jobs.api.client)


@pytest.fixture
def doomed(core: client.CoreV1Api) -> Iterator[NodeLayout]:
    with third_node(core) as node:
        yield node


@contextmanager
def cordoned(core: client.CoreV1Api) -> Iterator[None]:
    """The scheduler places nothing meanwhile."""
    names = [node.metadata.name for node in core.list_node().items]
    try:
        for name in names:
            core.patch_node(name, {"spec": {"unschedulable": True}})
        yield
    finally:
        for name in names:
            core.patch_node(name, {"spec": {"unschedulable": False}})


def bind(core: client.CoreV1Api, jobs: Jobs, pod: str, node: str) -> None:
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    body: Any = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    core.create_namespaced_pod_binding(pod, jobs.namespace, body, _preload_content=False)


def is_ready(core: client.CoreV1Api, node: str) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in core.read_node(node).status.conditions)


def ready_since(core: client.CoreV1Api, node: str) -> float:
    found = next(c for c in core.read_node(node).status.conditions if c.type == "Ready")
    return float(found.last_transition_time.timestamp())


def seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def test_a_job_that_allows_it_goes_on_elsewhere_and_its_budget_is_not_touched(
    jobs: Jobs, core: client.CoreV1Api, doomed: NodeLayout
) -> None:
    jobs.patch("ConfigMap", "scripts", {"data": {"steps.py": STEPS}})
    stays, other = doomed.cluster.node(0).name, doomed.cluster.node(1).name
    with cordoned(core):
        jobs.start("lives", "steps.py", restart={"maxRestarts": 0, "lostNodeSeconds": 5})
        until("pods", lambda: len(jobs.pods("lives")) == 2)
        bind(core, jobs, f"lives-{LOST}", doomed.name)
        bind(core, jobs, f"lives-{1 - LOST}", stays)
    jobs.until_running("lives")
    cut_power(doomed)
    until("the Node is NotReady", lambda: not is_ready(core, doomed.name), NOT_READY_SECONDS)
    not_ready = ready_since(core, doomed.name)

    def again() -> dict[str, Any] | None:
        history = jobs.job("lives")["status"].get("restartHistory", [])
        return history[0] if history and "downtimeSeconds" in history[0] else None

    restart = until("steps again", again, AGAIN_SECONDS)
    took = seconds(restart["time"]) + restart["downtimeSeconds"] - not_ready
    print(f"lost node {LOST}: first new step {took:.0f} s after NotReady, {restart['downtimeSeconds']} s after the failure was seen")
    assert took <= AGAIN_SECONDS
    status = jobs.job("lives")["status"]
    assert (restart["cause"], restart["node"], restart["counts"]) == ("NodeLost", LOST, False)
    assert doomed.name in restart["message"]
    assert (status["attempts"], status["restartsCountTowardsMax"]) == (2, 0)
    placed = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in jobs.pods("lives")}
    assert placed == {f"lives-{LOST}": other, f"lives-{1 - LOST}": stays}
    jobs.until_condition("lives", "NodesHealthy", "True", "AllNodesReady")
    jobs.until_running("lives")
    jobs.end("lives")


def test_a_preempted_pod_saves_is_replaced_and_costs_no_restart(jobs: Jobs, core: client.CoreV1Api) -> None:
    """As the scheduler does it: first the pod's condition, then its deletion."""
    jobs.start("yields", restart={"maxRestarts": 0})
    jobs.until_running("yields")
    mark = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempting to make room for y"}
    # Without a time, the disruption controller takes the mark for an old one of a pod that stayed, and sets it to False.
    mark["lastTransitionTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    core.patch_namespaced_pod_status("yields-1", jobs.namespace, {"status": {"conditions": [mark]}})
    core.delete_namespaced_pod("yields-1", jobs.namespace)
    history = until("the restart", lambda: jobs.job("yields")["status"].get("restartHistory"), 60)
    assert [(entry["cause"], entry["node"], entry["counts"]) for entry in history] == [("Preempted", 1, False)]
    assert history[0]["message"] == "node 1 was preempted: preempting to make room for y"
    until("attempt 2", lambda: jobs.job("yields")["status"]["attempts"] == 2, 60)
    jobs.until_running("yields")
    assert jobs.job("yields")["status"]["restartsCountTowardsMax"] == 0
    jobs.end("yields")
