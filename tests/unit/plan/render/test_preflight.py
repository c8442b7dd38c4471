"""Preflight in the operator: what nodes are expected to have, what status shows, and which nodes a job no longer uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.run import expected_by_preflight
from lockstep_gang.contract.preflight import (
    AllReduce,
    Bandwidth,
    Expected,
    ExpectedPath,
    ExpectedRdma,
    Finding,
    Kind,
    PreflightReport,
    SelfTest,
    Speed,
)
from lockstep_gang.contract.report import State
from lockstep_spec.choices import Severity
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, pod, report, running

TIME = "2027-01-15T08:00:00Z"
CREATED = "2027-01-15T07:59:00Z"
RDMA = {
    "network": {
        "rdma": {"enabled": True, "devices": ["mlx5_0:1", "mlx5_1"], "gidIndex": 3, "interfaces": ["net1"], "rate": 400},
        "mtu": 9000,
    }
}


def expects(profile: Object | None = None, **spec: Any) -> Expected | None:
    work = {} if "training" in spec else {"script": {"path": "a.py"}}
    job = TrainingJob.model_validate({"metadata": {"name": "x"}, "spec": {"nodes": 2, **work, **spec}})
    cluster = TrainingCluster.model_validate(
        {"metadata": {"name": "p"}, "spec": {"image": "i", "security": {"ipcLock": True}, **(profile or {})}}
    )
    return expected_by_preflight(resolve(job, cluster))


def needed(**spec: Any) -> Expected:
    found = expects(**spec)
    assert found is not None
    return found


def test_a_script_is_looked_for_on_every_node() -> None:
    assert needed().paths == (ExpectedPath("spec.script.path", "/workspace/a.py", Kind.FILE),)
    stated = needed(script={"folder": "repo", "path": "bin/a.py"}).paths
    assert [(item.field, item.path) for item in stated] == [
        ("spec.script.folder", "/workspace/repo"),
        ("spec.script.path", "/workspace/repo/bin/a.py"),
    ]
    assert needed(script={"module": "a.b"}).paths == needed(script={"command": ["bash", "run.sh"]}).paths == ()


def test_everything_local_that_a_training_reads_is_looked_for_and_hub_names_are_not() -> None:
    training = {
        "model": {"name": "/workspace/m"}, "lora": {"initFrom": "/workspace/a"}, "checkpoint": {"resumeFrom": "/workspace/c"},
        "data": {"sources": [{"path": "/datasets/1"}, {"name": "org/set"}], "chatTemplate": "/workspace/t.jinja"},
            "evaluation": {"data": {"path": "/datasets/2"}},
    }  # fmt: skip
    assert [(item.field, item.path, item.kind.value) for item in needed(training=training).paths] == [
        ("spec.training.model.name", "/workspace/m", "Folder"),
        ("spec.training.lora.initFrom", "/workspace/a", "Folder"),
        ("spec.training.data.chatTemplate", "/workspace/t.jinja", "File"),
        ("spec.training.data.sources[0].path", "/datasets/1", "File"),
        ("spec.training.evaluation.data.path", "/datasets/2", "File"),
        ("spec.training.checkpoint.resumeFrom", "/workspace/c", "Folder"),
    ]


def test_the_profile_says_what_nics_there_are_to_be() -> None:
    found = needed(profile=RDMA, gpusPerNode=4)
    assert found.rdma == ExpectedRdma(devices=("mlx5_0:1", "mlx5_1"), count=2, gid_index=3, interfaces=("net1",), mtu=9000, rate=400)
    assert needed(profile=RDMA, gpusPerNode=4, fabric={"mode": "TCP"}).rdma is None


@pytest.mark.parametrize(
    ("devices", "names", "count"),
    [(["mlx5_0:1", "mlx5_0:2"], ("mlx5_0:1", "mlx5_0:2"), 1), (["mlx5"], ("mlx5",), 3), (["mlx5_1", "rocep"], ("mlx5_1", "rocep"), 3)],
)
def test_two_ports_are_one_nic_and_a_beginning_stands_for_as_many_as_there_are_rails(
    devices: list[str], names: tuple[str, ...], count: int
) -> None:
    rails = [{"network": name} for name in ("a", "b", "c")]
    profile = {"network": {"rdma": {"enabled": True, "devices": devices, "rails": rails}}}
    found = needed(profile=profile, gpusPerNode=4).rdma
    assert (found.devices, found.count) == (names, count)


def test_preflight_can_be_switched_off() -> None:
    assert expects(preflight="None") is None


FAST = {"network": {"minimumBusbw": "1.5"}}
FAST_RDMA = {"network": {**RDMA["network"], "minimumBusbw": "150"}, "gpus": {"perNode": 4}}


@pytest.mark.parametrize(
    ("profile", "spec", "all_reduce"),
    [
        ({}, {}, None),
        (FAST, {}, AllReduce(1_500_000_000)),
        (FAST, {"nodes": 1}, None),
        (FAST, {"preflight": "Basic"}, None),
        ({}, {"preflight": "Full"}, AllReduce(None)),
        (FAST, {"gpusPerNode": 1}, None),
        (FAST_RDMA, {}, AllReduce(150_000_000_000)),
        (FAST_RDMA, {"fabric": {"mode": "TCP"}}, None),
        (FAST_RDMA, {"gpusPerNode": 0}, None),
    ],
)
def test_the_all_reduce_is_for_jobs_that_the_profile_s_threshold_speaks_of(profile: Object, spec: Object, all_reduce: Any) -> None:
    assert needed(profile=profile, **spec).all_reduce == all_reduce


TRAINING = {"training": {"model": {"name": "/m"}, "data": {"path": "/d"}, "precision": "FP16"}}


@pytest.mark.parametrize(
    ("spec", "self_test"),
    [
        ({"gpusPerNode": 4}, SelfTest("")),
        ({"gpusPerNode": 4, **TRAINING}, SelfTest("FP16")),
        ({}, None),
        ({"preflight": "Full"}, SelfTest("")),
        ({"gpusPerNode": 4, "preflight": "Basic"}, None),
    ],
)
def test_the_self_test_is_for_gpus_unless_the_job_says_otherwise(spec: Object, self_test: SelfTest | None) -> None:
    assert needed(**spec).self_test == self_test


SLOW = Finding("allReduce", Severity.ERROR, "node 1 (x-1) is slow", "look at its NICs", node=1, excludes=True)


def failing(*findings: Finding, state: State = State.WAITING, ok: bool = False) -> ReceivedReport:
    speed = Speed(8, True, "BF16", 590 * 10**12, 640_500 * 10**9)
    result = PreflightReport(TIME, ok, ("names",) * 12, 2, 345, findings, 0, Bandwidth(2, 1024, 1_234_000_000), speed)
    return report(state, 0, preflight=result)


def placed(nodes: int = 3) -> Observed:
    """Two pods on node-0 and node-1, of so many nodes."""
    pods = tuple(pod(node, metadata={**pod(node)["metadata"], "creationTimestamp": CREATED}) for node in range(2))
    there = tuple(
        {"metadata": {"name": f"node-{n}", "labels": {}}, "status": {"allocatable": {"cpu": "4", "memory": "8Gi"}}} for n in range(nodes)
    )
    return replace(running(), pods=pods, nodes=there)


def names(status: Object | None) -> list[str]:
    return [node["name"] for node in (status or {}).get("excludedNodes", [])]


def test_what_was_found_stands_in_status_with_the_node_s_name_and_the_fix() -> None:
    plan = reconcile(placed(), failing(SLOW), CONTEXT, NOW)
    assert plan.status["preflight"] == {
        "time": TIME, "ok": False, "checks": 12, "nodes": 2, "milliseconds": 345, "omitted": 0,
        "findings": [{"check": "allReduce", "severity": "Error", "node": 1, "nodeName": "node-1", "message": "node 1 (x-1) is slow",
                      "fix": "look at its NICs"}],
        "allReduce": {"ranks": 2, "bytes": 1024, "busbw": "1.234"},
        "selfTest": {"devices": 8, "precision": "BF16", "slowestTflops": "590.000", "fastestTflops": "640.500"},
    }  # fmt: skip
    assert condition(plan, "Progressing")[:2] == ("False", "PreflightFailed")


def test_a_preflight_that_passed_stops_nothing() -> None:
    plan = reconcile(placed(), failing(state=State.RUNNING, ok=True), CONTEXT, NOW)
    assert condition(plan, "Progressing")[1] != "PreflightFailed"
    assert [note.reason for note in plan.events if note.reason.startswith("Preflight")] == ["PreflightPassed"]


def test_a_job_that_preflight_failed_says_so() -> None:
    plan = reconcile(placed(), failing(replace(SLOW, excludes=False), state=State.FAILED), CONTEXT, NOW)
    assert condition(plan, "Failed")[:2] == ("True", "PreflightFailed")


def excluded() -> Observed:
    """The list is in status."""
    observed = placed()
    return after(observed, reconcile(observed, failing(SLOW), CONTEXT, NOW))


def test_a_bad_node_is_noted_first_and_its_pods_go_after_that() -> None:
    observed = placed()
    plan = reconcile(observed, failing(SLOW), CONTEXT, NOW)
    assert (names(plan.status), plan.apply) == (["node-1"], ())
    assert next(note.message for note in plan.events if note.reason == "NodeExcluded").startswith("node node-1 is left out")
    plan = reconcile(after(observed, plan), failing(SLOW), CONTEXT, NOW)
    assert [item["spec"]["replicas"] for item in plan.apply] == [0]
    assert condition(plan, "Progressing")[1] == "NodeExcluded"


def at_zero(observed: Observed) -> Observed:
    stateful_set = observed.objects["StatefulSet", "x"]
    gone = {**stateful_set, "spec": {**stateful_set["spec"], "replicas": 0}}
    return replace(observed, pods=(), objects={**observed.objects, ("StatefulSet", "x"): gone})


def affinity(plan: Plan) -> Object:
    (stateful_set,) = [item for item in (*plan.apply, *plan.create) if item["kind"] == "StatefulSet"]
    return stateful_set["spec"]["template"]["spec"]["affinity"]


def test_the_next_start_from_zero_leaves_the_node_out() -> None:
    plan = reconcile(at_zero(excluded()), None, CONTEXT, NOW)
    assert names(plan.status or excluded().status) == ["node-1"]
    (term,) = affinity(plan)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]}


def test_suspending_the_job_clears_the_list() -> None:
    observed = excluded()
    suspended = replace(observed, job={**observed.job, "spec": {**observed.job["spec"], "suspend": True}})
    assert names(reconcile(suspended, failing(SLOW), CONTEXT, NOW).status) == []


def test_a_node_that_nobody_can_replace_is_not_left_out() -> None:
    plan = reconcile(placed(nodes=2), failing(SLOW), CONTEXT, NOW)
    assert names(plan.status) == []


def test_a_finding_of_the_pod_before_says_nothing_of_the_node_of_the_pod_after_it() -> None:
    observed = placed()
    younger = {**observed.pods[1], "metadata": {**observed.pods[1]["metadata"], "creationTimestamp": "2027-01-15T08:00:30Z"}}
    plan = reconcile(replace(observed, pods=(observed.pods[0], younger)), failing(SLOW), CONTEXT, NOW)
    assert names(plan.status) == []


def test_a_finding_that_is_not_the_node_s_own_leaves_nobody_out() -> None:
    assert names(reconcile(placed(), failing(replace(SLOW, excludes=False)), CONTEXT, NOW).status) == []
