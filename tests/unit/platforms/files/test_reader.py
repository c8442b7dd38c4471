"""The pod that shows a job's files when none of the job's own runs: what it is, when it is made, and that it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from golden.plan_cases import cluster as profile_with
from golden.plan_cases import job, of_kind
from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.objects import claim_names
from lockstep.kube import expiry
from lockstep.kube.cluster import ApiError
from lockstep.kube.exec import PodPlace
from lockstep.plan.render.objects import render
from lockstep.plan.render.readerpod import is_shared, reader_pod
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.platforms.clusters.waits import Wait
from lockstep.platforms.files import reader as file_reader
from lockstep.platforms.files import reader as module
from lockstep.platforms.files.reader import NoReader, beside
from support.fake_cluster import FakeCluster
from unit.virtual_time import VirtualClock

Object = dict[str, Any]
RUNNING = {"phase": "Running", "containerStatuses": [{"name": "x", "state": {"running": {}}}]}


def stateful_set(storage: str = "Shared") -> Object:
    resolved = resolve(job(storage={"mode": storage}), profile_with("barcelona"), PlatformDefaults(namespace="ns"))
    found = of_kind(render(resolved), "StatefulSet")[0]
    found["metadata"]["uid"] = "uid-of-set"
    return found


def claim(name: str, phase: str = "Bound") -> Object:
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": name, "uid": name}, "spec": {}, "status": {"phase": phase}}


def job_pod(name: str, *, running: bool = True) -> Object:
    labels = {"lockstep.dev/job": "x"}
    return {"kind": "Pod", "metadata": {"name": name, "uid": name, "labels": labels}, "spec": {}, "status": RUNNING if running else {}}


def starts(item: Object) -> None:
    item["status"] = RUNNING


def shown(cluster: FakeCluster, node: int = 0, say: Callable[[str], None] = lambda line: None) -> PodPlace:
    """The place, after checking that it was there while it was used and that no reader is left."""

    async def look() -> PodPlace:
        async with beside(cluster.as_cluster, "ns", "x", node, say=say) as place:
            assert place.pod in cluster.names("Pod")
        assert not [name for name in cluster.names("Pod") if "reader" in name]
        return place

    return asyncio.run(look())


def test_a_reader_has_the_claims_and_the_image_of_the_jobs_pods_and_none_of_their_secrets_gpus_and_labels() -> None:
    found = stateful_set("PerPod")
    template = found["spec"]["template"]["spec"]
    pod = reader_pod(found, 1, "abc", 600)
    (container,) = pod["spec"]["containers"]
    assert not is_shared(found) and claim_names(pod) == ["workspace-x-1", "datasets-x-1"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/workspace", "/datasets", "/tmp"}  # noqa: S108
    assert container["image"] == template["containers"][0]["image"]
    assert "nvidia.com/gpu" not in str(pod["spec"]["containers"]) and "secret" not in str(pod["spec"]["volumes"])
    assert "lockstep.dev/job" not in pod["metadata"]["labels"] and "affinity" not in pod["spec"]
    assert pod["spec"]["tolerations"] == template["tolerations"] and pod["spec"]["activeDeadlineSeconds"] == 600


def test_a_reader_is_scheduled_and_pulled_as_the_jobs_pods_but_asks_for_no_runtime() -> None:
    pod = {"imagePullSecrets": ["login"], "tolerations": [{"operator": "Exists"}], "runtimeClassName": "nvidia"}
    profile = TrainingCluster.model_validate({"metadata": {"name": "p"}, "spec": {"image": "i", "pod": pod, "gpus": {"perNode": 4}}})
    found = reader_pod(of_kind(render(resolve(job(), profile, PlatformDefaults(namespace="ns"))), "StatefulSet")[0], 0, "abc", 600)["spec"]
    assert found["tolerations"][0] == {"operator": "Exists"} and found["imagePullSecrets"] == [{"name": "login"}]
    assert "runtimeClassName" not in found


def test_a_reader_is_restricted_also_where_the_jobs_pods_run_as_root() -> None:
    found = stateful_set()
    found["spec"]["template"]["spec"]["containers"][0]["securityContext"] = {"runAsUser": 0}
    found["spec"]["template"]["spec"]["securityContext"] = {"fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = reader_pod(found, 0, "abc", 600)
    assert pod["spec"]["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000,
    }  # fmt: skip
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_a_pod_of_the_job_that_runs_is_used_instead() -> None:
    for cluster, node in (
        (FakeCluster(stateful_set("PerPod"), job_pod("x-0"), job_pod("x-1")), 1),
        (FakeCluster(stateful_set(), job_pod("x-0", running=False), job_pod("x-1")), 0),
    ):
        assert shown(cluster, node) == PodPlace(cluster.as_cluster, "ns", "x-1", "trainer")


def test_a_node_whose_pod_does_not_run_has_its_files_shown_by_a_reader_that_is_removed_then() -> None:
    cluster = FakeCluster(stateful_set("PerPod"), job_pod("x-0"), claim("workspace-x-1"), claim("datasets-x-1"), on_create=starts)
    lines: list[str] = []
    place = shown(cluster, 1, lines.append)
    assert place.pod.startswith("x-reader-") and place.container == "reader"
    assert lines == [f"starting pod {place.pod} to access the files of job x; it is removed afterwards"], "said before it is waited for"


async def test_a_reader_is_removed_when_it_is_interrupted_while_it_starts() -> None:
    made = asyncio.Event()
    cluster = FakeCluster(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"), on_create=lambda item: made.set())
    task = asyncio.ensure_future(beside(cluster.as_cluster, "ns", "x").__aenter__())
    await made.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cluster.names("Pod") == []


def test_readers_that_ended_by_their_own_deadline_are_swept_up() -> None:
    left = reader_pod(stateful_set(), 0, "old", 600) | {"status": {"phase": "Failed", "reason": "DeadlineExceeded"}}
    left["metadata"]["uid"] = "old"
    cluster = FakeCluster(stateful_set("PerPod"), left, claim("workspace-x-0"), claim("datasets-x-0"), on_create=starts)
    shown(cluster)
    assert cluster.names("Pod") == []


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ([], "claim workspace-x-0 does not exist: the job's pods have not run yet"),
        ([claim("workspace-x-0", "Pending")], "claim workspace-x-0 is bound to no volume yet"),
    ],
)
def test_claims_that_cannot_be_mounted_are_told_before_a_pod_is_made(claims: list[Object], said: str) -> None:
    cluster = FakeCluster(stateful_set("PerPod"), *claims, on_create=starts)
    with pytest.raises(NoReader, match=said):
        shown(cluster)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('pods "x" is forbidden: exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4', "free some of the quota"),
        ('pods is forbidden: User "eve" cannot create resource "pods" in API group "" in the namespace "ns"', "the role `edit` has"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsUser=0', "violates PodSecurity"),
        (
            (
                'pods "x" is forbidden: unable to validate against any security context constraint: [provider restricted-v2: .x: Invalid'
                ' value: "csi": no, provider "y": Forbidden: not usable by user or serviceaccount]'
            ),
            'admits it: restricted-v2 says .x: Invalid value: "csi": no: oc adm policy',
        ),
    ],
)
def test_a_refused_reader_is_told_with_what_helps(message: str, said: str) -> None:
    def refuse(item: Object) -> None:
        raise ApiError(403, "Forbidden", message)

    cluster = FakeCluster(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"), on_create=refuse)
    with pytest.raises(NoReader, match=said):
        shown(cluster)


def test_a_reader_is_used_as_soon_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 3600.0)
    cluster = FakeCluster(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"))

    async def begins() -> Object:
        (pod,) = [item for (kind, _), item in cluster.objects.items() if kind == "Pod"]
        starts(pod)
        return pod

    cluster.on_watch = begins
    assert "reader" in shown(cluster).pod


@pytest.mark.parametrize("steps", range(5))
async def test_an_interrupt_that_comes_together_with_a_change_of_the_reader_is_not_lost(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 3600.0)
    cluster = FakeCluster(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"))
    reached, changes = asyncio.Event(), asyncio.Event()

    async def change() -> Object:
        reached.set()
        await changes.wait()
        return {}

    cluster.on_watch = change
    task = asyncio.create_task(beside(cluster.as_cluster, "ns", "x").__aenter__())
    await reached.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    changes.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=2)
    assert task.cancelled()
    assert cluster.names("Pod") == []


async def test_an_api_server_that_does_not_answer_holds_nobody_up_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (module, expiry):
        monkeypatch.setattr(one, "REMOVAL_SECONDS", 0.05)
    cluster = FakeCluster(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"), on_create=starts)
    asked = []

    async def silent(kind: str, namespace: str | None, name: str, uid: str | None = None, grace_seconds: int | None = None) -> None:
        asked.append(kind)
        await asyncio.sleep(3600)

    monkeypatch.setattr(cluster, "delete", silent)
    async with asyncio.timeout(10), beside(cluster.as_cluster, "ns", "x"):
        pass
    assert asked == ["Pod", "Job"]


def test_who_may_not_look_at_claims_may_still_have_a_reader() -> None:
    cluster = FakeCluster(stateful_set("PerPod"), on_create=starts)
    cluster.refused["PersistentVolumeClaim"] = ApiError(403, "Forbidden", "no")
    assert "reader" in shown(cluster).pod


def test_a_reader_whose_node_is_not_there_says_so_in_the_schedulers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TROUBLE_SECONDS", 0.0)
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    message = "0/2 nodes are available: 1 node(s) had volume node affinity conflict, 1 node(s) were unschedulable."

    def stuck(item: Object) -> None:
        item["status"] = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}

    cluster = FakeCluster(stateful_set("PerPod"), claim("workspace-x-0"), claim("datasets-x-0"), on_create=stuck)
    with pytest.raises(NoReader, match="volume node affinity conflict"):
        shown(cluster)
    assert cluster.names("Pod") == []


def test_without_rights_to_events_and_claims_a_pod_s_own_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(module, "TROUBLE_SECONDS", 0.0)
    waiting = {"name": "reader", "image": "i", "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no such key"}}}

    def stuck(item: Object) -> None:
        item["spec"]["nodeName"] = "a"
        item["status"] = {"phase": "Pending", "containerStatuses": [waiting]}

    cluster = FakeCluster(stateful_set(), on_create=stuck)
    cluster.refused = {kind: ApiError(403, "Forbidden", "no") for kind in ("Event", "PersistentVolumeClaim")}
    with pytest.raises(NoReader, match=r"does not start: .* container reader: CreateContainerConfigError: no such key"):
        shown(cluster)


def test_a_job_that_never_started_has_no_files() -> None:
    with pytest.raises(ConfigError, match="job x in namespace ns has never started"):
        shown(FakeCluster())


@pytest.mark.parametrize(("trouble", "seconds"), [("no node has room", 24.0), (None, 300.0)])
def test_a_pod_that_does_not_start_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch, trouble: str | None, seconds: float) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(file_reader, "time", clock)

    async def waits(*_: object) -> dict[str, Wait]:
        return {} if trouble is None else {"p": Wait(trouble)}

    monkeypatch.setattr(file_reader, "why_pods_wait", waits)
    pod = {"kind": "Pod", "metadata": {"name": "p", "namespace": "ns"}, "status": {}}
    place = PodPlace(FakeCluster(pod).as_cluster, "ns", "p", "c")

    async def story() -> None:
        await file_reader._until_running(place, lambda line: None, asyncio.Event())

    assert clock.seconds_of(story()) == pytest.approx(seconds, abs=2.0)
