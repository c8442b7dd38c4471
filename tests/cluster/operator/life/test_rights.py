"""Who may do what: the operator's own rights, a pod's right to report, and what the role `admin` of one namespace is enough for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, dynamic

from lockstep.api.names import REPORT_AUDIENCE
from lockstep_gang.contract.proof import parse_key, report_signature
from lockstep_gang.contract.report import REPORT_BYTES_MAX, NodeReport, RankCount, Report, State, job_header, report_body
from lockstep_gang.contract.run import JobIdentity
from lockstep_spec.codec import to_json
from support.checkout import ROOT
from support.clusters.cluster_jobs import SCRIPTS, Jobs, kubeconfig_of, until

OPERATOR = "system:serviceaccount:lockstep-system:lockstep-operator"
Kubectl = Callable[..., subprocess.CompletedProcess[str]]

# Run in a pod: posts what it is given and prints the replies' codes.
SPEAK = """
import json, ssl, sys, urllib.error, urllib.request
run = json.load(open("/etc/lockstep/run/run.json"))["report"]
context = ssl.create_default_context(cadata=run["caPem"])
def post(headers, body):
    request = urllib.request.Request(run["url"], data=body.encode(), headers=headers, method="POST")
    try:
        return urllib.request.urlopen(request, context=context).status
    except urllib.error.HTTPError as error:
        return post(headers, body) if error.code == 421 else error.code  # the Service chose the replica that doesn't lead
print(json.dumps([post(*message) for message in json.load(sys.stdin)]))
"""

MAY = [
    ("list", "trainingjobs.lockstep.dev"), ("watch", "trainingclusters.lockstep.dev"), ("patch", "trainingjobs.lockstep.dev/status"),
    ("update", "trainingjobs.lockstep.dev/finalizers"), ("create", "statefulsets.apps"), ("delete", "statefulsets.apps"),
    ("create", "secrets"), ("create", "persistentvolumeclaims"), ("delete", "configmaps"), ("list", "nodes"),
    ("watch", "pods"), ("delete", "pods"), ("create", "events"), ("delete", "trainingjobs.lockstep.dev"),
    ("create", "tokenreviews.authentication.k8s.io"), ("create", "subjectaccessreviews.authorization.k8s.io"),
        ("patch", "networkpolicies.networking.k8s.io"),
]  # fmt: skip
MAY_NOT = [
    ("get", "secrets"), ("list", "secrets"), ("watch", "secrets"), ("patch", "secrets"), ("delete", "secrets"), ("update", "secrets"),
        ("create", "pods"),
("create", "pods/exec"), ("deletecollection", "pods"), ("patch", "pods"), ("create", "pods/eviction"), ("get", "pods/log"),
    ("delete", "persistentvolumeclaims"), ("patch", "persistentvolumeclaims"),
    ("create", "serviceaccounts"), ("create", "serviceaccounts/token"), ("patch", "nodes"), ("delete", "services"),
        ("create", "trainingjobs.lockstep.dev"),
    ("patch", "trainingjobs.lockstep.dev"), ("create", "namespaces"), ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("create", "leases.coordination.k8s.io"), ("get", "leases.coordination.k8s.io"), ("patch", "leases.coordination.k8s.io"), ("*", "*"),
]  # fmt: skip


def may(api: dynamic.DynamicClient, user: str, verb: str, resource: str, namespace: str = "default") -> bool:
    """Return what RBAC says. `resource`: as kubectl names it, with its group and subresource."""
    named, _, subresource = resource.partition("/")
    name, _, group = named.partition(".")
    asked = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": subresource}
    groups = ["system:authenticated"]
    if user.startswith("system:serviceaccount:"):
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
    body = {"spec": {"user": user, "groups": groups, "resourceAttributes": asked}}
    return bool(client.AuthorizationV1Api(api.client).create_subject_access_review(body).status.allowed)


def test_the_operator_may_do_what_it_does_and_no_more(operator: None, api: dynamic.DynamicClient) -> None:
    assert [right for right in MAY if not may(api, OPERATOR, *right)] == []
    assert [right for right in MAY_NOT if may(api, OPERATOR, *right)] == []


@pytest.mark.parametrize(
    ("role", "can"), [("edit", {"get", "create", "delete"}), ("admin", {"get", "create", "delete"}), ("view", {"get"})]
)
def test_the_built_in_roles_of_a_namespace_are_enough_for_jobs_there(
    operator: None, namespace: str, api: dynamic.DynamicClient, kubectl: Kubectl, role: str, can: set[str]
) -> None:
    bound = kubectl("create", "rolebinding", "people", f"--clusterrole={role}", "--user=alice", "-n", namespace)
    assert bound.returncode == 0, bound.stderr

    def allowed(place: str) -> set[str]:
        return {verb for verb in ("get", "create", "delete") if may(api, "alice", verb, "trainingjobs.lockstep.dev", place)}

    until(f"the rights of {role}", lambda: allowed(namespace) == can)  # the API server aggregates roles a moment later
    assert allowed("default") == set()


@dataclass
class Speaker:
    """Speaks to the operator from node 1 of a job, as whoever holds a token."""

    jobs: Jobs
    kubectl: Kubectl
    job: dict[str, Any]
    key: bytes

    def token(self, pod: str, audience: str = REPORT_AUDIENCE) -> str:
        """As the kubelet projects it: bound to the pod."""
        uid = (self.jobs.get("Pod", pod) or {})["metadata"]["uid"]
        spec = {"audiences": [audience], "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": pod, "uid": uid}}
        core = client.CoreV1Api(self.jobs.api.client)
        made = core.create_namespaced_service_account_token(
            "ml-dev-sa", self.jobs.namespace, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        )
        return str(made.status.token)

    def report(self) -> Report:
        """What the coordinator could say now."""
        metadata = self.job["metadata"]
        return Report(
            job=JobIdentity(metadata["name"], self.jobs.namespace, metadata["uid"]), pod=f"{metadata['name']}-0",
            sequence=time.time_ns(), attempt=1, restarts=0, state=State.RUNNING, message="all ranks run",
            nodes=(NodeReport(0, True, 1), NodeReport(1, True, 1)), ranks=RankCount(2, 2),
        )  # fmt: skip

    def message(self, token: str, body: bytes, key: bytes | None = None) -> tuple[dict[str, str], str]:
        signature = report_signature(self.key if key is None else key, body)
        job = job_header(JobIdentity(**json.loads(body)["job"]))
        return {"Authorization": f"Bearer {token}", "X-Lockstep-Job": job, "X-Lockstep-Signature": signature}, body.decode()

    def say(self, *messages: tuple[dict[str, str], str]) -> list[int]:
        """The replies' codes."""
        name = f"{self.job['metadata']['name']}-1"
        done = self.kubectl(
            "exec", "-i", name, "-n", self.jobs.namespace, "-c", "trainer", "--", "python3", "-c", SPEAK, input=json.dumps(messages)
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def speaker(jobs: Jobs, kubectl: Kubectl) -> Iterator[Speaker]:
    """A job that runs; nobody but the tests' messages and its own coordinator speak for it."""
    jobs.start("speaks")
    jobs.until_running("speaks")
    key = parse_key(jobs.key_of("speaks").decode())
    yield Speaker(jobs, kubectl, jobs.job("speaks"), key)
    jobs.end("speaks")


def test_node_zero_is_heard_once_and_a_replay_is_refused(speaker: Speaker) -> None:
    message = speaker.message(speaker.token("speaks-0"), report_body(speaker.report()))
    assert speaker.say(message, message) == [200, 409]


def test_a_token_for_another_audience_is_refused(speaker: Speaker) -> None:
    token = speaker.token("speaks-0", "https://kubernetes.default.svc")
    assert speaker.say(speaker.message(token, report_body(speaker.report()))) == [401]


def test_an_unsigned_report_and_one_signed_by_another_key_are_refused(speaker: Speaker) -> None:
    headers, body = speaker.message(speaker.token("speaks-0"), report_body(speaker.report()))
    bare = {name: value for name, value in headers.items() if name != "X-Lockstep-Signature"}
    other_key = speaker.message(speaker.token("speaks-0"), body.encode(), key=b"\0" * 32)
    assert speaker.say((bare, body), other_key) == [401, 401]


def test_another_node_of_the_same_job_is_refused(speaker: Speaker) -> None:
    assert speaker.say(speaker.message(speaker.token("speaks-1"), report_body(speaker.report()))) == [403]


def test_node_zero_of_another_job_is_refused(speaker: Speaker) -> None:
    speaker.jobs.start("neighbor", "ok.py", nodes=1)
    until("its pod", lambda: speaker.jobs.get("Pod", "neighbor-0"))
    token = speaker.token("neighbor-0")
    report = speaker.report()
    assert speaker.say(
        speaker.message(token, report_body(report)), speaker.message(token, report_body(replace(report, pod="neighbor-0")))
    ) == [403, 403]
    speaker.jobs.end("neighbor")


def test_a_body_that_is_too_large_is_refused(speaker: Speaker) -> None:
    body = json.dumps(to_json(replace(speaker.report(), message="x" * REPORT_BYTES_MAX))).encode()
    assert speaker.say(speaker.message(speaker.token("speaks-0"), body)) == [413]


def test_a_job_that_is_not_there_is_refused(speaker: Speaker) -> None:
    report = speaker.report()
    gone = replace(report, job=replace(report.job, uid="00000000-0000-0000-0000-000000000000"))
    assert speaker.say(speaker.message(speaker.token("speaks-0"), report_body(gone))) == [401]


def test_the_pod_that_was_node_zero_is_refused(speaker: Speaker) -> None:
    token = speaker.token("speaks-0")
    old = (speaker.jobs.get("Pod", "speaks-0") or {})["metadata"]["uid"]
    speaker.jobs.kind("Pod").delete(name="speaks-0", namespace=speaker.jobs.namespace, grace_period_seconds=0)

    def replaced() -> bool:
        pod = speaker.jobs.get("Pod", "speaks-0")
        return pod is not None and pod["metadata"]["uid"] != old

    until("another node 0", replaced)
    assert speaker.say(speaker.message(token, report_body(speaker.report())))[0] in (401, 403)


def test_the_role_admin_is_enough_to_run_a_job_in_a_namespace(other: Jobs, cluster: Path, tmp_path: Path) -> None:
    other.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "ml-dev-sa"}})
    other.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scripts"}, "data": SCRIPTS})
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
    spec = {"nodes": 2, "script": {"path": "/scripts/ok.py"}, "podTemplate": {"volumes": [volume]}, "restart": {"maxRestarts": 0}}
    job = tmp_path / "job.yaml"
    job.write_text(
        yaml.safe_dump({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "alone"}, "spec": spec})
    )
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig_of("admin", other, cluster, tmp_path))}
    words = ["run", "-f", str(job), "--in-namespace", "-n", other.namespace, "--cluster", "local"]
    command = [sys.executable, "-m", "lockstep.cli.main", *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello from 0" in done.stdout, done.stdout
    stateful_set = other.get("StatefulSet", "alone", "apps/v1")
    assert stateful_set["spec"]["replicas"] == 0
    owner = stateful_set["metadata"]["ownerReferences"][0]
    assert owner["kind"] == "ConfigMap"
    other.delete("ConfigMap", owner["name"])
    until("the rest is gone with it", lambda: other.get("StatefulSet", "alone", "apps/v1") is None)
    assert other.get("PersistentVolumeClaim", "ml-dev-workspace") is not None
