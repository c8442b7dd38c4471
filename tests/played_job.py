"""A job whose pods and coordinator are played by the test: API server and controllers are real, and a start takes milliseconds.

The job's pods name a scheduler that doesn't exist. The test binds them to a node without a kubelet, says that they run, takes them away when they
are to end, and reports as node 0 with a token of its own: what the operator sees is what a real gang would show it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from cluster_jobs import API, SERVICE_ACCOUNT, Jobs
from lockstep.api.names import REPORT_AUDIENCE, REPORT_URL
from lockstep_gang.contract import (
    Cause,
    Failure,
    JobIdentity,
    NodeReport,
    RankCount,
    Report,
    ReportTarget,
    Restart,
    State,
    parse_key,
    report_body,
)
from lockstep_gang.coordinator.post import post

NODE = "lockstep-played"
JOB = "x"
REPORT_SECONDS = 0.3
"""Instead of the coordinator's 15: the test has no time."""
CHILDREN = (
    ("StatefulSet", "apps/v1"), ("Service", "v1"), ("NetworkPolicy", "networking.k8s.io/v1"), ("ConfigMap", "v1"), ("Secret", "v1"),
    ("PersistentVolumeClaim", "v1"), ("Pod", "v1"),
)  # fmt: skip
RUNS = {"phase": "Running", "containerStatuses": [
    {"name": "trainer", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}
]}  # fmt: skip


@dataclass
class PlayedJob:
    """Job x in a namespace of its own. `tick` plays on; whoever waits calls it."""

    jobs: Jobs
    port: int
    """Where the operator takes reports."""
    ca_pem: str
    folder: Path
    revive: Callable[[], None]
    """Starts an operator that ended by itself."""
    attempt: int = 1
    state: State = State.RUNNING
    history: tuple[Restart, ...] = ()
    _reported: float = 0.0
    _key: bytes | None = None
    _uid: str = ""
    _told: State | None = None
    """The state of the newest report that was taken: the last lines are told until then."""

    def create(self) -> None:
        spec = {"nodes": 2, "script": {"path": "/scripts/x.py"}, "podTemplate": {"schedulerName": "played"}, "storage": {"mode": "Shared"}}
        made = self.jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": JOB}, "spec": spec})
        self._uid = made["metadata"]["uid"]

    def fail_and_start_again(self) -> None:
        failure = Failure("rank 1 on node 1 exited with 1", rank=1, node=1, exit_code=1, cause=Cause.USER_CODE)
        self.history = (*self.history, Restart(self.attempt, "2026-01-01T00:00:00Z", failure, lost_steps=3))
        self.attempt += 1

    def tick(self) -> None:
        self.revive()
        pods = self.jobs.pods(JOB)
        for pod in pods:
            self._play(pod)
        zero = next((pod for pod in pods if pod["metadata"]["name"] == f"{JOB}-0"), None)
        if zero is not None and _runs(zero) and time.monotonic() - self._reported > REPORT_SECONDS:
            self._reported = time.monotonic()
            self._report(zero)

    def _play(self, pod: dict[str, Any]) -> None:
        core, name, namespace = client.CoreV1Api(self.jobs.api.client), pod["metadata"]["name"], self.jobs.namespace
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        try:
            if "deletionTimestamp" in pod["metadata"]:
                core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
            elif not pod["spec"].get("nodeName"):
                core.create_namespaced_pod_binding(name, namespace, {"metadata": {"name": name}, "target": target}, _preload_content=False)
                core.patch_namespaced_pod_status(name, namespace, {"status": RUNS})
        except ApiException as error:
            if error.status not in (404, 409):  # gone, or bound already
                raise

    def _report(self, zero: dict[str, Any]) -> None:
        if self._key is None:
            self._key = parse_key(self.jobs.secret(f"{JOB}-agents", "key").decode())
        target = ReportTarget(REPORT_URL, self.ca_pem, str(self._token(zero["metadata"]["uid"])))
        try:
            answer = post(target, self._key, report_body(self.report()), f"127.0.0.1:{self.port}")
        except OSError:  # the operator is away
            return
        if answer.status == 200:
            self._told = self.state

    def _token(self, uid: str) -> Path:
        path = self.folder / f"token-{uid}"
        if not path.exists():
            spec = {"audiences": [REPORT_AUDIENCE], "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": f"{JOB}-0", "uid": uid}}
            core = client.CoreV1Api(self.jobs.api.client)
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
            path.write_text(core.create_namespaced_service_account_token(SERVICE_ACCOUNT, self.jobs.namespace, body).status.token)
        return path

    def report(self) -> Report:
        over = self.state in (State.COMPLETE, State.FAILED)
        return Report(
            job=JobIdentity(JOB, self.jobs.namespace, self._uid), pod=f"{JOB}-0", sequence=time.time_ns(), attempt=self.attempt,
            restarts=len(self.history), state=self.state, message="all ranks run", nodes=tuple(NodeReport(n, True, 1) for n in range(2)),
            ranks=RankCount(2, 0 if over else 2), restarts_counted=len(self.history), history=self.history,
            log=("[rank 0] done",) if over and self._told is not self.state else (),
        )  # fmt: skip

    def until(self, what: str, look: Callable[[], Any], seconds: float = 60.0) -> Any:
        """The first result that is true, while the job is played."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tick()
            found = look()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{what} did not happen in {seconds:.0f} s; status is {self.jobs.job(JOB).get('status')}")

    def is_(self, condition: str, status: str = "True") -> bool:
        return bool(self.jobs.condition(JOB, condition).get("status") == status)

    def runs(self) -> bool:
        """All of this attempt is in status."""
        return (
            self.jobs.condition(JOB, "Progressing").get("reason") == "Running" and self.jobs.job(JOB)["status"]["attempts"] == self.attempt
        )

    def uids(self, kind: str) -> dict[str, str]:
        version = dict(CHILDREN)[kind]
        items = self.jobs.kind(kind, version).get(namespace=self.jobs.namespace).to_dict()["items"]
        return {item["metadata"]["name"]: item["metadata"]["uid"] for item in items}

    def state_of_everything(self) -> str:
        """The job and all in its namespace as text, without what differs between two runs of the same story."""
        items = [self.jobs.job(JOB)]
        for kind, version in CHILDREN:
            found = self.jobs.kind(kind, version).get(namespace=self.jobs.namespace).to_dict()["items"]
            items += [{**item, "kind": kind} for item in sorted(found, key=lambda item: str(item["metadata"]["name"]))]
        return _normalised([_plain(item) for item in items if item and item["metadata"]["name"] != "kube-root-ca.crt"], self.jobs.namespace)


def _runs(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


_DROPPED = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "selfLink")


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in item["metadata"].items() if key not in _DROPPED}
    if item["kind"] == "Pod":
        metadata["labels"].pop("controller-revision-hash")
    kept = {key: value for key, value in item.items() if key not in ("metadata", "apiVersion")}
    if item["kind"] in ("Pod", "PersistentVolumeClaim", "Service"):  # addresses and what other controllers say
        kept = {"kind": item["kind"]}
    if item["kind"] == "StatefulSet":
        kept["status"] = {}
    if item["kind"] == "Secret":
        kept["data"] = sorted(item["data"])
    return {**kept, "metadata": metadata}


def _normalised(items: list[dict[str, Any]], namespace: str) -> str:
    text = json.dumps(items, indent=1, sort_keys=True).replace(namespace, "NAMESPACE")
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "UID", text)
    hashes = set(re.findall(rf"{JOB}-run-([0-9a-z]+)", text))
    for found in hashes:
        text = text.replace(found, "HASH")
    text = re.sub(r'("\w+Seconds": )\d+', r"\1SECONDS", text)
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME", text)
