"""The operator in its pod: jobs on real pods, from their creation to what is left of them."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from lockstep.api.status import ConditionType
from lockstep.kube.cluster import Cluster
from lockstep.platforms.operator.certificate import service_names
from lockstep.platforms.operator.operator import Operator, Settings
from lockstep.platforms.operator.secrets import certificates, master_key
from support.clusters.cluster_jobs import API, SERVICE_ACCOUNT, Jobs, cluster_like_local, prepare, until
from support.clusters.counting_proxy import CountingProxy

IMAGE = "localhost/lockstep/base:1"
NEVER_STARTS: dict[str, Any] = {"podTemplate": {"schedulerName": "none"}}
"""Of a job of whose pods it is enough that they are there."""
Kubectl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def profile(jobs: Jobs) -> Iterator[dict[str, Any]]:
    """A TrainingCluster of this test's own, like `local`."""
    kind = jobs.kind("TrainingCluster", API)
    spec = kind.get(name="local").to_dict()["spec"]
    name = f"{jobs.namespace}-profile"
    yield kind.create(body={"apiVersion": API, "kind": "TrainingCluster", "metadata": {"name": name}, "spec": spec}).to_dict()
    kind.delete(name=name)


@pytest.fixture
def counting_proxy(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingProxy]:
    """Everything that this test's own operator sends goes through it."""
    with CountingProxy(cluster).running() as proxy:
        monkeypatch.setenv("KUBECONFIG", str(proxy.kubeconfig(tmp_path)))
        yield proxy


def change_profile(jobs: Jobs, profile: dict[str, Any], spec: dict[str, Any]) -> None:
    jobs.kind("TrainingCluster", API).patch(
        name=profile["metadata"]["name"], body={"spec": spec}, content_type="application/merge-patch+json"
    )


def test_a_script_job_completes_on_two_pods_and_leaves_its_claims_and_last_lines(jobs: Jobs) -> None:
    jobs.start("done", "ok.py")
    jobs.until_condition("done", "Complete", "True", "Complete")
    until("no pods", lambda: not jobs.pods("done"))
    metadata, status = jobs.job("done")["metadata"], jobs.job("done")["status"]
    assert not metadata.get("finalizers")
    assert not metadata.get("annotations")
    assert status["ranks"] == {"desired": 2, "ready": 0}
    assert (status["cluster"]["name"], status["cluster"]["transport"]) == ("local", "TCP")
    assert {c["observedGeneration"] for c in status["conditions"]} == {1}
    assert [c["type"] for c in status["conditions"]] == [str(kind) for kind in ConditionType]
    stateful_set = jobs.get("StatefulSet", "done", "apps/v1")
    assert stateful_set["spec"]["replicas"] == 0
    log = jobs.get("ConfigMap", "done-log")
    assert "hello from 0" in log["data"]["node-0.log"]
    jobs.end("done")
    until("the StatefulSet is gone", lambda: jobs.get("StatefulSet", "done", "apps/v1") is None)
    until("the last lines are gone", lambda: jobs.get("ConfigMap", "done-log") is None)
    assert jobs.get("PersistentVolumeClaim", "ml-dev-workspace") is not None


def test_a_changed_profile_and_job_wait_for_the_next_start_from_zero(jobs: Jobs, profile: dict[str, Any]) -> None:
    jobs.start("frozen", nodes=1, cluster=profile["metadata"]["name"])
    jobs.until_running("frozen")
    before = jobs.get("StatefulSet", "frozen", "apps/v1")
    pods = {pod["metadata"]["uid"] for pod in jobs.pods("frozen")}
    change_profile(jobs, profile, {"shmSize": "300Mi"})
    until("status says pending", lambda: jobs.job("frozen")["status"]["run"]["pending"])
    jobs.change("frozen", resources={"memory": "512Mi"})
    until("the new generation is observed", lambda: jobs.job("frozen")["status"]["observedGeneration"] == 2)
    after = jobs.get("StatefulSet", "frozen", "apps/v1")
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert {pod["metadata"]["uid"] for pod in jobs.pods("frozen")} == pods
    old = jobs.job("frozen")["status"]["run"]["name"]
    jobs.change("frozen", suspend=True)
    jobs.until_condition("frozen", "Suspended", "True", "Suspended")
    jobs.change("frozen", suspend=False)
    until("a pod of the new run", lambda: jobs.pods("frozen"))
    run = until("status shows the new run", lambda: _other_run(jobs, "frozen", old))
    assert not run["pending"]
    pod = jobs.pods("frozen")[0]["spec"]
    assert [v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "lockstep-shm"] == ["300Mi"]
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}}
    until("the old frozen run is gone", lambda: jobs.get("ConfigMap", old) is None)
    jobs.end("frozen")


def _other_run(jobs: Jobs, name: str, old: str) -> dict[str, Any] | None:
    run: dict[str, Any] = jobs.job(name)["status"]["run"]
    return run if run["name"] != old else None


def test_a_missing_profile_is_told_and_the_job_starts_when_it_comes(jobs: Jobs) -> None:
    name = f"{jobs.namespace}-late"
    jobs.start("waits", cluster=name, **NEVER_STARTS)
    told = jobs.until_condition("waits", "Accepted", "False", "ClusterNotFound")
    assert name in told["message"]
    kind = jobs.kind("TrainingCluster", API)
    spec = kind.get(name="local").to_dict()["spec"]
    kind.create(body={"apiVersion": API, "kind": "TrainingCluster", "metadata": {"name": name}, "spec": spec})
    try:
        jobs.until_condition("waits", "Accepted", "True", "Accepted")
        until("pods", lambda: len(jobs.pods("waits")) == 2)
    finally:
        jobs.end("waits")
        kind.delete(name=name)


def test_rdma_where_there_is_none_is_refused_until_the_job_says_otherwise(jobs: Jobs) -> None:
    jobs.start("fast", fabric={"mode": "RDMA"}, **NEVER_STARTS)
    jobs.until_condition("fast", "Accepted", "False", "RDMAUnavailable")
    assert jobs.condition("fast", "Progressing")["reason"] == "RDMAUnavailable"
    jobs.change("fast", fabric={"mode": "TCP"})
    jobs.until_condition("fast", "Accepted", "True", "Accepted")
    jobs.end("fast")


def test_a_missing_service_account_is_told_and_the_job_starts_when_it_is_made(other: Jobs) -> None:
    other.start("nobody", **NEVER_STARTS)
    told = other.until_condition("nobody", "Accepted", "False", "ServiceAccountNotFound")
    assert f"kubectl create serviceaccount {SERVICE_ACCOUNT} -n {other.namespace}" in told["message"]
    prepare(other.api, other.namespace)
    other.until_condition("nobody", "Accepted", "True", "Accepted")
    until("pods", lambda: len(other.pods("nobody")) == 2)


def test_a_claim_that_cant_bind_is_named_and_the_job_goes_on_when_it_can(other: Jobs) -> None:
    prepare(other.api, other.namespace)
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "ml-dev-workspace"},
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "no-such-class", "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    other.create(claim)
    other.start("unbound")
    told = other.until_condition("unbound", "PodsScheduled", "False", "ClaimNotBound")
    assert "claim ml-dev-workspace is Pending" in told["message"]
    assert "no-such-class" in told["message"]
    other.change("unbound", suspend=True)
    other.until_condition("unbound", "Suspended", "True", "Suspended")
    other.delete("PersistentVolumeClaim", "ml-dev-workspace")
    until("the claim is gone", lambda: other.get("PersistentVolumeClaim", "ml-dev-workspace") is None)
    other.change("unbound", suspend=False)
    other.until_condition("unbound", "PodsScheduled", "True", "AllScheduled")


def test_an_image_that_cant_be_pulled_is_named(jobs: Jobs) -> None:
    jobs.start("imageless", nodes=1, image="localhost/lockstep/none:1")
    told = jobs.until_condition("imageless", "RanksReady", "False", "ImagePullFailed")
    assert "localhost/lockstep/none:1" in told["message"]
    assert jobs.condition("imageless", "Progressing")["reason"] == "ImagePullFailed"
    jobs.change("imageless", suspend=True)
    jobs.until_condition("imageless", "Suspended", "True", "Suspended")
    jobs.change("imageless", suspend=False, image=IMAGE)
    jobs.until_condition("imageless", "RanksReady", "True", "AllRanksReady")
    jobs.end("imageless")


def test_nodes_that_lack_a_resource_are_named(jobs: Jobs, gpu_cluster: str) -> None:
    jobs.start("gpus", cluster=gpu_cluster, gpusPerNode=7)
    told = jobs.until_condition("gpus", "PodsScheduled", "False", "Unschedulable")
    nodes = ", ".join(sorted(node.metadata.name for node in client.CoreV1Api(jobs.api.client).list_node().items))
    assert told["message"] == f"0 of 2 pods scheduled: nodes {nodes} lack nvidia.com/gpu"
    jobs.change("gpus", suspend=True)
    jobs.until_condition("gpus", "Suspended", "True", "Suspended")
    jobs.end("gpus")


def test_a_quota_is_told_in_the_words_of_the_api_server(other: Jobs) -> None:
    prepare(other.api, other.namespace)
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    other.create(quota)
    until("the quota counts", lambda: (other.get("ResourceQuota", "few") or {}).get("status", {}).get("hard"))
    other.start("many")
    told = other.until_condition("many", "PodsScheduled", "False", "PodsRefused")
    assert told["message"].startswith("1 of 2 pods created")
    assert "exceeded quota: few" in told["message"]
    other.delete("ResourceQuota", "few")
    other.until_condition("many", "PodsScheduled", "True", "AllScheduled")


def test_an_object_of_its_name_that_is_anothers_is_never_touched(jobs: Jobs) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "unrelated"}, "data": {"a": "b"}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "mine-headless"},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
    }
    jobs.create(body)
    made = jobs.create(service)
    jobs.start("mine", **NEVER_STARTS)
    told = jobs.until_condition("mine", "Accepted", "False", "NameTaken")
    assert told["message"].startswith(f"Service mine-headless in namespace {jobs.namespace} exists already")
    there = jobs.get("Service", "mine-headless")
    assert there["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert jobs.get("StatefulSet", "mine", "apps/v1") is None
    jobs.delete("Service", "mine-headless")
    jobs.until_condition("mine", "Accepted", "True", "Accepted")
    jobs.end("mine")


def test_a_job_deleted_and_created_again_under_its_name_works(jobs: Jobs) -> None:
    first = jobs.start("again", nodes=1)
    jobs.until_running("again")
    jobs.end("again")
    until("the job is gone", lambda: not jobs.job("again"))
    second = jobs.start("again", nodes=1)
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    jobs.until_running("again")
    owners = [
        jobs.get(kind, name, api) for kind, name, api in (("StatefulSet", "again", "apps/v1"), ("Secret", jobs.key_secret("again"), "v1"))
    ]
    assert {o["metadata"]["ownerReferences"][0]["uid"] for o in owners if o} == {second["metadata"]["uid"]}
    jobs.end("again")


def test_a_reconcile_that_changes_nothing_sends_nothing(jobs: Jobs, counting_proxy: CountingProxy) -> None:
    jobs.start("quiet")
    jobs.until_running("quiet")
    gloo = jobs.until_condition("quiet", "FabricVerified", "Unknown", "Gloo")
    assert gloo["message"] == "CPU ranks over gloo (over eth0): nothing to verify"

    async def reconcile_often() -> tuple[int, int]:
        """(requests before, requests after): a second operator that has just been started and looks at a job that runs."""
        async with await Cluster.connect() as connection:
            names = service_names("lockstep-operator", "lockstep-system")
            master = await master_key(connection, "lockstep-system")
            tls = await certificates(connection, "lockstep-system", names, datetime.now(UTC))
            second = Operator(connection, Settings(agent_image=IMAGE), master, tls)
            await second.resync()
            key = (jobs.namespace, "quiet")
            await second.work(key)  # reads the frozen run: lists and watches have only its name
            before = len(counting_proxy.requests)
            for _ in range(5):
                await second.work(key)
            return before, len(counting_proxy.requests)

    before, after = asyncio.run(reconcile_often())
    assert before > 10
    assert after == before
    writes = [r for r in counting_proxy.requests if r[0] != "GET"]
    assert [r for r in writes if "/tokenreviews" not in r[1]] == []
    jobs.end("quiet")


def test_the_agent_starts_beside_a_root_that_no_scc_gives_a_user_to_also_from_an_image_of_root(jobs: Jobs) -> None:
    """A file of OpenShift leaves users to its SCCs, and the one that admits RDMA pods assigns none, as plain Kubernetes doesn't."""

    def over_rdma(spec: dict[str, Any]) -> None:
        spec.update(
            platform="OpenShift", network={**spec["network"], "rdma": {"enabled": True}}, security={**spec["security"], "ipcLock": True}
        )

    def started(pod: dict[str, Any]) -> bool:
        [trainer] = pod["status"].get("containerStatuses") or [{}]
        return bool({"running", "terminated"} & {name for name, state in (trainer.get("state") or {}).items() if state})

    with cluster_like_local(jobs, "root", over_rdma) as name:
        jobs.start("rooted", cluster=name, fabric={"mode": "RDMA"})
        until("both agents start", lambda: len(pods := jobs.pods("rooted")) == 2 and all(map(started, pods)))
        [agent] = jobs.pods("rooted")[0]["spec"]["initContainers"]
        assert agent["image"] == IMAGE and agent["securityContext"]["runAsUser"] > 0
        jobs.end("rooted")
