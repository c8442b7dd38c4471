"""Two jobs that hold half of what each needs, on two nodes with one GPU each: neither fails, and both end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from lockstep.plan.reconcile.placing import AWAY_SECONDS, HOLD_SECONDS
from support.clusters.cluster_jobs import Jobs, until

TAINT = {"key": "lockstep.dev/test", "value": "second", "effect": "NoSchedule"}
BOTH_SECONDS = 2 * HOLD_SECONDS + 2 * AWAY_SECONDS[0] + 120


@pytest.fixture
def only_for_the_second(jobs: Jobs, gpus: list[str]) -> Iterator[str]:
    """A node that nobody gets who doesn't tolerate its taint."""
    core = client.CoreV1Api(jobs.api.client)
    core.patch_node(gpus[1], {"spec": {"taints": [TAINT]}})
    try:
        yield gpus[1]
    finally:
        core.patch_node(gpus[1], {"spec": {"taints": None}})


def holds_half(jobs: Jobs, name: str) -> bool:
    return sorted(bool(pod["spec"].get("nodeName")) for pod in jobs.pods(name)) == [False, True]


def start(jobs: Jobs, cluster: str, name: str, **template: Any) -> None:
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
    jobs.start(
        name,
        "ok.py",
        cluster=cluster,
        gpusPerNode=1,
        preflight="None",
        startTimeoutSeconds=20,
        podTemplate={"volumes": [volume], **template},
    )
    until(f"{name} holds one node", lambda: holds_half(jobs, name))


@pytest.mark.long
def test_two_jobs_that_hold_half_of_the_nodes_each_both_complete(jobs: Jobs, only_for_the_second: str, gpu_cluster: str) -> None:
    core = client.CoreV1Api(jobs.api.client)
    start(jobs, gpu_cluster, "first")
    time.sleep(1.0)  # times of creation have whole seconds, and the younger job is to be the one that lets go
    start(jobs, gpu_cluster, "second", tolerations=[{"key": TAINT["key"], "operator": "Exists"}])
    core.patch_node(only_for_the_second, {"spec": {"taints": None}})
    for name in ("first", "second"):
        waits = jobs.until_condition(name, "Progressing", "False", "Unschedulable")
        assert "holds 1 of 2 nodes; releases them at " in waits["message"]

    jobs.until_condition("second", "Progressing", "False", "NodesReleased", 2 * HOLD_SECONDS)
    assert jobs.job("second")["status"]["placement"]["releases"] == 1
    for name in ("first", "second"):
        until(f"{name} is complete", lambda name=name: jobs.condition(name, "Complete").get("status") == "True", BOTH_SECONDS)
        assert jobs.job(name)["status"].get("restarts", 0) == 0
    told = jobs.kind("Event").get(namespace=jobs.namespace, field_selector="involvedObject.kind=TrainingJob").to_dict()["items"]
    assert [e["involvedObject"]["name"] for e in told if e["reason"] == "NodesReleased"] == ["second"]
