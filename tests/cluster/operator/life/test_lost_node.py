"""Ranks by racks, and a node that dies without a word. The longest test of all: Kubernetes takes 40 to 50 s to believe that one is dead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from kubernetes import client

from lockstep.devcluster.host.layout import NodeLayout
from support.clusters.cluster_jobs import Jobs, cluster_like_local, until
from support.clusters.cluster_nodes import cut_power, third_node

RACK = "example.com/rack"
WHERE = """
import os, pathlib
told = [os.environ[name] for name in ("RANK", "NODE_RANK", "GROUP_RANK")]
pathlib.Path("/workspace/node-" + os.environ["LOCKSTEP_NODE"]).write_text(" ".join(told))
"""


@pytest.fixture(scope="module")
def core(jobs: Jobs) -> client.CoreV1Api:
    return client.CoreV1Api(jobs.api.client)


@pytest.fixture
def third(core: client.CoreV1Api) -> Iterator[NodeLayout]:
    """Well until a test cuts its power; the next test gets another one."""
    with third_node(core) as node:
        yield node


@pytest.fixture
def racked(jobs: Jobs, core: client.CoreV1Api) -> Iterator[tuple[str, list[str]]]:
    """A cluster that names a rack label, and a node in each of two racks."""
    nodes = sorted(node.metadata.name for node in core.list_node().items)
    with cluster_like_local(jobs, "racks", lambda spec: spec.update(nodes={**(spec.get("nodes") or {}), "rackLabel": RACK})) as name:
        try:
            for node, rack in zip(nodes, "ab", strict=True):
                core.patch_node(node, {"metadata": {"labels": {RACK: rack}}})
            yield name, nodes
        finally:
            for node in nodes:
                core.patch_node(node, {"metadata": {"labels": {RACK: None}}})


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


def test_a_preempted_pod_saves_is_replaced_and_costs_no_restart(jobs: Jobs, core: client.CoreV1Api) -> None:
    """As the scheduler does it: first the pod's condition, then its deletion."""
    jobs.start("yields", restart={"maxRestarts": 0})
    jobs.until_running("yields")
    mark = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempting to make room for y"}
    # Without a time, the disruption controller takes the mark for an old one of a pod that stayed, and sets it to False.
    mark["lastTransitionTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    core.patch_namespaced_pod_status("yields-1", jobs.namespace, {"status": {"conditions": [mark]}})
    core.delete_namespaced_pod("yields-1", jobs.namespace)
    history = until("the restart", lambda: jobs.job("yields")["status"].get("restartHistory"))
    assert [(entry["cause"], entry["node"], entry["counts"]) for entry in history] == [("Preempted", 1, False)]
    assert history[0]["message"] == "node 1 was preempted: preempting to make room for y"
    until("attempt 2", lambda: jobs.job("yields")["status"]["attempts"] == 2)
    jobs.until_running("yields")
    assert jobs.job("yields")["status"]["restartsCountTowardsMax"] == 0
    jobs.end("yields")


def test_ranks_of_one_rack_are_neighbors_though_their_nodes_numbers_are_not(
    jobs: Jobs, core: client.CoreV1Api, racked: tuple[str, list[str]]
) -> None:
    profile, nodes = racked
    jobs.patch("ConfigMap", "scripts", {"data": {"where.py": WHERE}})
    with cordoned(core):
        jobs.start("racks", "where.py", nodes=3, cluster=profile)
        until("pods", lambda: len(jobs.pods("racks")) == 3)
        for number, node in enumerate((nodes[0], nodes[1], nodes[0])):
            bind(core, jobs, f"racks-{number}", node)
    jobs.until_condition("racks", "Complete", "True", "Complete")
    told = [(jobs.workspace() / f"node-{number}").read_text() for number in range(3)]
    assert told == ["0 0 0", "2 2 2", "1 1 1"]
    log = jobs.get("ConfigMap", "racks-log")
    assert "ranks follow the racks: node 0, 2 (rack a), then 1 (rack b)" in log["data"]["node-0.log"]
    jobs.end("racks")
    until("its pods are gone", lambda: not jobs.pods("racks"))


@pytest.mark.long
@pytest.mark.parametrize("lost", [1, 0], ids=["node 1", "node 0 and the coordinator"])
def test_a_job_that_allows_it_goes_on_elsewhere_and_its_budget_is_not_touched(
    jobs: Jobs, core: client.CoreV1Api, third: NodeLayout, lost: int
) -> None:
    name = f"lives-without-{lost}"
    stays, other = third.cluster.node(0).name, third.cluster.node(1).name
    with cordoned(core):
        jobs.start(name, "steps.py", restart={"maxRestarts": 0, "lostNodeSeconds": 5})
        until("pods", lambda: len(jobs.pods(name)) == 2)
        bind(core, jobs, f"{name}-{lost}", third.name)
        bind(core, jobs, f"{name}-{1 - lost}", stays)
    jobs.until_running(name)
    cut_power(third)
    until("the Node is NotReady", lambda: not is_ready(core, third.name))
    not_ready = ready_since(core, third.name)

    def again() -> dict[str, Any] | None:
        history = jobs.job(name)["status"].get("restartHistory", [])
        return history[0] if history and "downtimeSeconds" in history[0] else None

    restart = until("steps again", again)
    took = seconds(restart["downSince"]) + restart["downtimeSeconds"] - not_ready
    print(f"lost node {lost}: first new step {took:.0f} s after NotReady, {restart['downtimeSeconds']} s after the last step before it")
    status = jobs.job(name)["status"]
    assert (restart["cause"], restart["node"], restart["counts"]) == ("NodeLost", lost, False)
    assert third.name in restart["message"]
    assert (status["attempts"], status["restartsCountTowardsMax"]) == (2, 0)
    placed = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in jobs.pods(name)}
    assert placed == {f"{name}-{lost}": other, f"{name}-{1 - lost}": stays}
    jobs.until_condition(name, "NodesHealthy", "True", "AllNodesReady")
    jobs.until_running(name)
    jobs.end(name)
