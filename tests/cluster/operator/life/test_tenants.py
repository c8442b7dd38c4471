"""Two tenants on one cluster, one of them hostile: it neither delays the other, nor is named to it. What the operator may write."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes import client

from lockstep.api.names import OPERATOR_NAMESPACE
from support.clusters.cluster_jobs import API, Jobs, prepare, until

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
Object = dict[str, Any]
OPERATOR = "system:serviceaccount:lockstep-system:lockstep-operator"
FLOOD = """
import http.client, json, pathlib, ssl, sys, threading, time, urllib.parse
sys.path.insert(0, "/lockstep/agent.pyz")
from lockstep_gang.contract.proof import parse_key, report_signature
from lockstep_gang.contract.report import RankCount, Report, State, job_header, report_body
from lockstep_gang.contract.run import JobIdentity
run = json.load(open("/etc/lockstep/run/run.json"))
key = parse_key(pathlib.Path("/etc/lockstep/agents/key").read_text())
job, url = JobIdentity(**run["job"]), urllib.parse.urlsplit(run["report"]["url"])
context = ssl.create_default_context(cadata=run["report"]["caPem"])
counts = {}
def flood(number):
    while True:
        body = report_body(Report(job, job.name + "-0", time.time_ns(), 1, 0, State.RUNNING, "", (), RankCount(1, 1)))
        headers = {"Authorization": f"Bearer bad{number}", "X-Lockstep-Job": job_header(job),
                   "X-Lockstep-Signature": report_signature(key, body)}
        connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=10, context=context)
        try:
            connection.request("POST", url.path, body=body, headers=headers)
            said = connection.getresponse().status
        except OSError as error:
            said = type(error).__name__
        finally:
            connection.close()
        counts[said] = counts.get(said, 0) + 1
for number in range(48):
    threading.Thread(target=flood, args=(number,), daemon=True).start()
while not pathlib.Path("/tmp/stop").exists():
    time.sleep(0.1)
print(json.dumps({str(key): count for key, count in counts.items()}), flush=True)
"""


@pytest.fixture
def mallory(jobs: Jobs) -> Iterator[Jobs]:
    core = client.CoreV1Api(jobs.api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "mallory-"}}).metadata.name
    try:
        yield prepare(jobs.api, namespace)
    finally:
        core.delete_namespace(namespace)


def restarts(jobs: Jobs) -> int:
    pods = client.CoreV1Api(jobs.api.client).list_namespaced_pod(OPERATOR_NAMESPACE).items
    return sum(status.restart_count for pod in pods for status in pod.status.container_statuses or ())


def forge_a_gathering_job(mallory: Jobs) -> None:
    """An admin of a namespace may write statuses there: this job says for nine minutes that it has the first turn."""
    mallory.start("decoy", suspend=True, gpusPerNode=1)
    now = datetime.now(UTC)
    since, release = (f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (now, now + timedelta(minutes=9)))
    placement = {"placed": 1, "wanted": 2, "since": since, "releaseTime": release}
    group, _, version = API.partition("/")
    patch = client.CustomObjectsApi(mallory.api.client).patch_namespaced_custom_object_status
    patch(group, version, mallory.namespace, "trainingjobs", "decoy", {"status": {"placement": placement}})


def test_no_delay_and_no_name_of_a_hostile_tenant_reaches_another(
    jobs: Jobs, mallory: Jobs, gpus: list[str], gpu_cluster: str, kubectl: Kubectl
) -> None:
    def in_pod(command: str, input: str | None = None) -> str:
        words = ("exec", "-i", "flood-0", "-n", mallory.namespace, "-c", "trainer", "--", "sh", "-c", command)
        done = kubectl(*words, input=input)
        assert done.returncode == 0, done.stderr
        return done.stdout

    mallory.start("layoffs", cluster=gpu_cluster, gpusPerNode=1, preflight="None")
    mallory.start("flood", nodes=1, gpusPerNode=0)
    mallory.until_running("layoffs")
    mallory.until_running("flood")
    forge_a_gathering_job(mallory)
    before = restarts(jobs)
    in_pod("cat > /tmp/flood.py; setsid python3 /tmp/flood.py > /tmp/counts 2>&1 < /dev/null &", FLOOD)
    jobs.start("train", cluster=gpu_cluster, gpusPerNode=1, preflight="None")
    counted = "jobs of other namespaces hold 2"
    until("what others hold is counted", lambda: counted in jobs.condition("train", "PodsScheduled").get("message", ""))
    mallory.end("layoffs")
    jobs.until_running("train")  # its reports are heard, too
    counts = json.loads(in_pod("touch /tmp/stop; for i in $(seq 100); do grep -s . /tmp/counts && exit; sleep 0.1; done"))
    assert counts.get("ConnectionResetError", 0) > 0, counts
    assert any(counts.get(refused) for refused in ("401", "429")), counts
    events = jobs.kind("Event").get(namespace=jobs.namespace).to_dict()["items"]
    told = [event["message"] for event in events if event["involvedObject"]["kind"] == "TrainingJob"]
    text = json.dumps([jobs.job("train")["status"], told])
    assert [name for name in (mallory.namespace, "layoffs", "decoy", "flood") if name in text] == []
    assert not [event["message"] for event in events if event["reason"] == "NodesReleased"]
    assert restarts(jobs) == before
    jobs.end("train")
    until("no pods", lambda: not jobs.pods("train"))


OWNED = [{"apiVersion": API, "kind": "TrainingJob", "name": "x", "uid": "1", "controller": True}]
POD: Object = {"automountServiceAccountToken": False, "containers": [{"name": "c", "image": "i"}]}


def token(**more: str) -> list[Object]:
    return [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t", **more}}]}}]


def stateful_set(name: str = "x", owners: list[Object] | None = OWNED, **pod: Any) -> Object:
    labels = {"a": "b"}
    template = {"metadata": {"labels": labels}, "spec": POD | pod}
    spec = {"replicas": 0, "serviceName": "s", "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name, "ownerReferences": owners}, "spec": spec}


def item(kind: str, name: str, owners: list[Object] | None = OWNED, **more: Any) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "ownerReferences": owners}, **more}


def container(**more: Any) -> list[Object]:
    return [{"name": "c", "image": "i", **more}]


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        (stateful_set(), True),
        (stateful_set(volumes=token(audience="lockstep.dev/report")), True),
        (stateful_set(containers=container(securityContext={"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}})), True),
        (item("Secret", "x-agents-1-ab"), True),
        (item("Secret", "x-agents"), True),
        (item("ConfigMap", "x-run-0ab1"), True),
        (item("Service", "x-headless", spec={"clusterIP": "None"}), True),
        (stateful_set(owners=None), False),
        (stateful_set(name="y"), False),
        (stateful_set(owners=[{**OWNED[0], "apiVersion": "apps/v1", "kind": "Deployment"}]), False),
        (stateful_set(automountServiceAccountToken=True), False),
        (stateful_set(volumes=token()), False),
        (stateful_set(volumes=[{"name": "h", "hostPath": {"path": "/"}}]), False),
        (stateful_set(hostNetwork=True), False),
        (stateful_set(hostPID=True), False),
        (stateful_set(hostIPC=True), False),
        (stateful_set(containers=container(securityContext={"privileged": True})), False),
        (stateful_set(containers=container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}})), False),
        (stateful_set(containers=container(ports=[{"containerPort": 1, "hostPort": 1}])), False),
        (stateful_set(initContainers=container(name="first", securityContext={"privileged": True})), False),
        (item("Secret", "lockstep-notify", None), False),
        (item("Secret", "x-agents", type="kubernetes.io/service-account-token"), False),
        (item("ConfigMap", "aws-auth", None), False),
        (item("ConfigMap", "x-anything"), False),
        (item("Service", "x-headless", spec={"clusterIP": "None", "externalIPs": ["192.0.2.1"]}), False),
    ],
)  # fmt: skip
def test_the_operator_s_account_may_write_what_belongs_to_a_job_and_reaches_nothing_else(
    operator: None, namespace: str, kubectl: Kubectl, wanted: Object, allowed: bool
) -> None:
    metadata = {**wanted["metadata"], "namespace": namespace}
    if metadata["name"].startswith("x-agents") and not allowed:
        metadata["annotations"] = {"kubernetes.io/service-account.name": "default"}
    text = json.dumps({**wanted, "metadata": {key: value for key, value in metadata.items() if value is not None}})
    done = kubectl("create", "--dry-run=server", "--as", OPERATOR, "-f", "-", input=text)
    assert (done.returncode == 0) == allowed, done.stderr
    assert allowed or "ValidatingAdmissionPolicy 'lockstep-operator'" in done.stderr


def test_the_operator_s_account_changes_and_deletes_no_object_of_anybody_else(operator: None, namespace: str, kubectl: Kubectl) -> None:
    assert kubectl("create", "configmap", "theirs", "-n", namespace).returncode == 0
    patch = json.dumps({"metadata": {"ownerReferences": OWNED}})
    for words in (("patch", "configmap", "theirs", "--type=merge", "-p", patch), ("delete", "configmap", "theirs")):
        done = kubectl(*words, "-n", namespace, "--as", OPERATOR)
        assert "ValidatingAdmissionPolicy 'lockstep-operator'" in done.stderr
