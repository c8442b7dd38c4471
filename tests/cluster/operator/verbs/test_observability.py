"""What a job's life leaves for others to see: metrics, events and where its time went. A real operator, real pods."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families

from lockstep.kube.cluster import Cluster
from lockstep.platforms.clusters.install import monitoring_objects, send_one, without_unknown_kinds
from support.checkout import ROOT
from support.clusters.cluster_jobs import Jobs, until

IMAGE = "localhost/lockstep/base:1"
OPERATOR_SPACE = "lockstep-system"
SERVER_NAME = "lockstep-operator.lockstep-system.svc"
Kubectl = Callable[..., subprocess.CompletedProcess[str]]

# Tells five steps as any script may, then fails, and again before it has told any; the third attempt, which waits for the backoff, does the
# last two again.
STEPS = """
import json, os, socket, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["LOCKSTEP_ATTEMPT"])
report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
if attempt == 2 and rank == "1":
    raise RuntimeError("another trouble")
for step in range(1, 6) if attempt == 1 else range(4, 7):
    time.sleep(0.6)
    if rank == "0":
        report.send(json.dumps({"rank": 0, "event": "step", "step": step, "totalSteps": 6, "metrics": {"loss": "2.5"}}).encode())
if attempt == 1 and rank == "1":
    raise RuntimeError("a passing trouble")
if attempt == 1:
    time.sleep(60)
"""
# Run in a pod: GET /metrics from each address with each token, as Prometheus does: certificate and name are verified.
SCRAPE = """
import json, socket, ssl, sys
asked = json.load(sys.stdin)
context = ssl.create_default_context(cadata=asked["ca"])
def get(address, token):
    with context.wrap_socket(socket.create_connection((address, 8444), 10), server_hostname=asked["name"]) as connection:
        bearer = "Authorization: Bearer " + token + "\\r\\n" if token else ""
        connection.sendall(("GET /metrics HTTP/1.0\\r\\n" + bearer + "\\r\\n").encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, body = answer.partition("\\r\\n\\r\\n")
    return int(head.split()[1]), body
print(json.dumps([[get(address, token) for token in asked["tokens"]] for address in asked["addresses"]]))
"""


@pytest.fixture(scope="module")
def monitored(jobs: Jobs) -> Iterator[None]:
    """What `lockstep deploy --monitoring` sends to a cluster without the Prometheus operator."""

    async def send(remove: bool) -> None:
        async with await Cluster.connect() as cluster:
            objects = await without_unknown_kinds(cluster, monitoring_objects(ROOT / "manifests"), lambda line: None)
            for item in [] if remove else objects:
                await send_one(cluster, item)
            for item in reversed(objects) if remove else []:
                await cluster.delete(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])

    asyncio.run(send(remove=False))
    yield
    asyncio.run(send(remove=True))


@pytest.fixture(scope="module")
def scraper(jobs: Jobs) -> str:
    """Start a pod in the cluster's network, and return its name."""
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "seen"}, "data": {"steps.py": STEPS}})
    container = {"name": "scraper", "image": IMAGE, "command": ["sleep", "3600"]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    jobs.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "scraper"}, "spec": spec})
    return "scraper"


@pytest.fixture(scope="module")
def done(jobs: Jobs, scraper: str, monitored: None) -> dict[str, Any]:
    """A job that failed twice, went on and completed; as it is then."""
    volume = {"name": "seen", "mountPath": "/scripts", "configMap": {"name": "seen"}}
    restart = {"maxRestarts": 2, "backoffSeconds": 1}
    jobs.start("seen", "steps.py", podTemplate={"volumes": [volume]}, restart=restart)
    until("the end", lambda: {jobs.condition("seen", end).get("status") for end in ("Complete", "Failed")} & {"True"}, 90)
    assert jobs.condition("seen", "Complete")["status"] == "True", jobs.job("seen")["status"]
    return jobs.job("seen")


def test_every_transition_is_an_event_once(jobs: Jobs, done: dict[str, Any]) -> None:
    events = (
        jobs.kind("Event").get(namespace=jobs.namespace, field_selector=f"involvedObject.uid={done['metadata']['uid']}").to_dict()["items"]
    )
    told = [event["reason"] for event in events]
    assert set(told) >= {"Accepted", "PodsScheduled", "RanksReady", "AttemptStarted", "Restarting", "Complete"}
    assert len({(event["reason"], event["message"]) for event in events}) == len(events)
    restarts = sorted((event["message"], event["type"]) for event in events if event["reason"] == "Restarting")
    assert [kind for _, kind in restarts] == ["Warning"] * 2
    assert "attempt 1 failed (UserCode): rank 1 on node 1 exited with 1: RuntimeError: a passing trouble" in restarts[0][0]
    assert "attempt 2 failed (UserCode): rank 1 on node 1 exited with 1: RuntimeError: another trouble" in restarts[1][0]


def test_status_says_where_the_time_went(done: dict[str, Any]) -> None:
    goodput = done["status"]["goodput"]
    assert 0 < goodput["percentage"] < 100
    assert goodput["downSeconds"] >= 1
    assert goodput["trainSeconds"] >= 1
    assert [loss["cause"] for loss in goodput["losses"]] == ["UserCode"]


def test_metrics_are_shown_to_the_reader_s_account_only(jobs: Jobs, done: dict[str, Any], kubectl: Kubectl, scraper: str) -> None:
    core = client.CoreV1Api(jobs.api.client)
    other = core.create_namespaced_service_account_token("ml-dev-sa", jobs.namespace, {"spec": {}}).status.token
    system = Jobs(jobs.api, OPERATOR_SPACE)
    until("the reader's token", lambda: ((system.get("Secret", "lockstep-metrics-reader") or {}).get("data") or {}).get("token"))
    pods = core.list_namespaced_pod(OPERATOR_SPACE, label_selector="app.kubernetes.io/component=operator").items
    addresses = [pod.status.pod_ip for pod in pods if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None]
    reader = system.secret("lockstep-metrics-reader", "token").decode()
    asked = {
        "ca": (system.get("ConfigMap", "lockstep-operator-ca") or {})["data"]["ca.crt"], "name": SERVER_NAME, "addresses": addresses,
        "tokens": [reader, other, "", reader],  # the first look at a namespace's counters finds zeros
    }  # fmt: skip
    ran = kubectl("exec", "-i", scraper, "-n", jobs.namespace, "--", "python3", "-c", SCRAPE, input=json.dumps(asked))
    assert ran.returncode == 0, ran.stderr
    answers = json.loads(ran.stdout)
    assert [[code for code, _ in each] for each in answers] == [[200, 403, 401, 200]] * len(addresses)
    found: dict[tuple[str, str], float] = {}
    for body in (each[-1][1] for each in answers):
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                if sample.labels.get("job_namespace") in (None, jobs.namespace):
                    own = [
                        value
                        for name, value in sorted(sample.labels.items())
                        if name in ("kind", "cause", "state", "outcome", "code", "job_name")
                    ]
                    found[sample.name, "/".join(own)] = found.get((sample.name, "/".join(own)), 0.0) + sample.value
    assert found["lockstep_operator_leader", ""] == 1
    assert found["lockstep_jobs", "Complete"] == 1
    assert found["lockstep_jobs_finished_total", "Complete"] == 1
    assert found["lockstep_restarts_total", "UserCode"] == 2
    assert found["lockstep_goodput_seconds_total", "train"] == done["status"]["goodput"]["trainSeconds"]
    assert found["lockstep_reconcile_seconds_count", ""] > 0
    assert not any(name == "seen" for _, name in found)
