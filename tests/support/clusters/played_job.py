"""A job whose pods and coordinator are played by the test: API server and controllers are real, and a start takes milliseconds.

The job's pods name a scheduler that doesn't exist. The test binds them to a node without a kubelet, says that they run, takes them away
when they are to end, and reports as node 0 with a token of its own: what the operator sees is what a real gang would show it. As a real
coordinator, node 0 tells how its stop went and stays until that is accepted, and the next pod of its name begins the next attempt.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from lockstep.api.names import REPORT_AUDIENCE, REPORT_URL
from lockstep_gang.contract.preflight import Finding, PreflightReport
from lockstep_gang.contract.proof import parse_key
from lockstep_gang.contract.report import Cause, Failure, NodeReport, RankCount, Report, Restart, Save, State, StopReport, report_body
from lockstep_gang.contract.run import JobIdentity, ReportTarget
from lockstep_gang.coordinator.https_post import Sender
from lockstep_spec.choices import Severity
from support.clusters.cluster_jobs import API, SERVICE_ACCOUNT, Jobs

NODES = tuple(f"lockstep-played-{number}" for number in range(4))
JOB = "x"
REPORT_SECONDS = 0.3
"""Seconds between reports, instead of the coordinator's 15, to keep tests short."""
SHORTEST_PAUSE_SECONDS = 0.04
"""Pause after a write of the operator's, since controllers act on those. Pauses grow up to REPORT_SECONDS as long as it writes nothing."""
PATIENCE_SECONDS = 20.0
"""Seconds that node 0 waits at its end for a report to be accepted."""
CHILDREN = (
    ("StatefulSet", "apps/v1"), ("Service", "v1"), ("NetworkPolicy", "networking.k8s.io/v1"), ("ConfigMap", "v1"), ("Secret", "v1"),
    ("PersistentVolumeClaim", "v1"), ("Pod", "v1"),
)  # fmt: skip
PULLS = {"phase": "Pending", "containerStatuses": [
    {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "manifest unknown"}}, "ready": False,
        "restartCount": 0,
     "image": "i", "imageID": ""}
]}  # fmt: skip


def runs_now() -> dict[str, Any]:
    """The status of a pod whose container has just started: one that had run for an hour would be silent before its first report."""
    state = {"running": {"startedAt": _now()}}
    container = {"name": "trainer", "state": state, "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}
    return {"phase": "Running", "containerStatuses": [container]}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class PlayedJob:
    """Job x in a namespace of its own. `tick` plays on; whoever waits calls it."""

    jobs: Jobs
    port: int
    """Port where the operator accepts reports."""
    ca_pem: str
    folder: Path
    revive: Callable[[], None]
    """Starts an operator that ended by itself."""
    wait: Callable[[float], bool]
    """Waits for so many seconds at most; True if the operator has written something."""
    attempt: int = 1
    state: State = State.RUNNING
    history: tuple[Restart, ...] = ()
    stop: StopReport | None = None
    preflight: PreflightReport | None = None
    nodes: int = 2
    report_url: str = REPORT_URL
    image: str = ""
    """The kubelets can pull no other; empty: all."""
    lost: int | None = None
    """A node that node 0 hears nothing of."""
    more: dict[str, Any] = field(default_factory=dict)
    """Fields of the report that are as the test says."""
    _reported: float = 0.0
    _key: bytes | None = None
    _uid: str = ""
    _zero: str = ""
    """The uid of the pod that is node 0."""
    _told: tuple[Any, ...] = ()
    """Content of the newest accepted report: until then, new reports carry last lines."""
    _leaves: float | None = None
    """Time at which node 0 goes, no matter who has heard it."""

    def create(self, **more: Any) -> None:
        spec = {"nodes": 2, "script": {"path": "/scripts/x.py"}, "podTemplate": {"schedulerName": "played"}, "storage": {"mode": "Shared"}}
        made = self.jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": JOB}, "spec": spec | more})
        self._uid = made["metadata"]["uid"]

    def fail_and_start_again(self) -> None:
        failure = Failure("rank 1 on node 1 exited with 1", rank=1, node=1, exit_code=1, cause=Cause.USER_CODE)
        self.history = (*self.history, Restart(self.attempt, "2026-01-01T00:00:00Z", failure, lost_steps=3))
        self.attempt += 1

    def find_node_one_bad(self) -> None:
        finding = Finding("allReduce", Severity.ERROR, "1 GB/s where others have 20", "look at its NICs", node=1, excludes=True)
        self.preflight = PreflightReport(_now(), ok=False, checks=("allReduce",), nodes=self.nodes, milliseconds=5, findings=(finding,))

    def tick(self) -> None:
        self.revive()
        pods = self.jobs.pods(JOB)
        zero = next((pod for pod in pods if pod["metadata"]["name"] == f"{JOB}-0"), None)
        if zero is not None and zero["status"].get("phase") == "Running":
            self._play_coordinator(zero)
        for pod in pods:
            if pod is not zero or not self._stays(pod):
                self._play(pod)

    def _play_coordinator(self, zero: dict[str, Any]) -> None:
        uid = zero["metadata"]["uid"]
        if uid != self._zero:
            self.attempt += bool(self._zero)
            self._zero, self._leaves, self.nodes, self.preflight = uid, None, self._replicas(), None
            self._key = None  # a new start may have another
        if _ends(zero) and self._leaves is None and (self.is_over or self._is_known_to_stop()):
            self._leaves = time.monotonic() + PATIENCE_SECONDS
            if not self.is_over:
                self.state = State.WAITING
                self.stop = StopReport(
                    self.attempt, "2026-01-01T00:00:00Z", Save.SAVED, "saved at step 7 and stopped", step=7, lost_steps=0
                )
        if not _ends(zero) and self.state is State.WAITING:
            self.state = State.RUNNING
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._reported = time.monotonic()
            self._report(uid)

    def _stays(self, zero: dict[str, Any]) -> bool:
        """True if node 0 stays until the result of the stop is heard."""
        if not _ends(zero) or zero["metadata"]["uid"] != self._zero:
            return False
        return self._leaves is None or (time.monotonic() < self._leaves and self._told != self._news)

    def _is_known_to_stop(self) -> bool:
        """True once status says that the job stops: saving takes until then, so that a stop's messages don't depend on who is faster."""
        job = self.jobs.job(JOB)
        conditions = (job.get("status") or {}).get("conditions", [])
        return not job or any(
            c["type"] == "Progressing" and c["reason"] in ("Stopping", "Resizing", "NodeExcluded", "StartReplaced") for c in conditions
        )

    @property
    def is_over(self) -> bool:
        return self.state in (State.COMPLETE, State.FAILED)

    @property
    def _news(self) -> tuple[Any, ...]:
        return self.state, self.attempt, self.stop

    def _replicas(self) -> int:
        return int((self.jobs.get("StatefulSet", JOB, "apps/v1") or {"spec": {"replicas": self.nodes}})["spec"]["replicas"]) or self.nodes

    def _play(self, pod: dict[str, Any]) -> None:
        core, name, namespace = client.CoreV1Api(self.jobs.api.client), pod["metadata"]["name"], self.jobs.namespace
        target = {"apiVersion": "v1", "kind": "Node", "name": _node_for(pod)}
        try:
            if _ends(pod) and self.image and not self._is_known_to_stop():
                return  # as with a gang's pods: what is told doesn't depend on who is faster
            if _ends(pod):
                core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
            elif not pod["spec"].get("nodeName"):
                core.create_namespaced_pod_binding(name, namespace, {"metadata": {"name": name}, "target": target}, _preload_content=False)
                can_pull = self.image in ("", pod["spec"]["containers"][0]["image"])
                core.patch_namespaced_pod_status(name, namespace, {"status": runs_now() if can_pull else PULLS})
        except ApiException as error:
            if error.status not in (404, 409):  # gone, or bound already
                raise

    def _report(self, uid: str) -> None:
        news, report = self._news, self.report()
        try:
            target = ReportTarget(self.report_url, self.ca_pem, str(self._token(uid)))
            if self._key is None:
                self._key = parse_key(self.jobs.key_of(JOB).decode())
            with closing(Sender(target, self._key)) as sender:
                answer = sender.post(report.job, report_body(report), f"127.0.0.1:{self.port}")
        except (OSError, http.client.HTTPException):  # the operator is away
            return
        except (ApiException, AssertionError):  # the pod or the Secret is gone: the job is being removed
            self._leaves = 0.0
            return
        if answer.status == 200:
            self._told = news
        elif answer.status == 403 and self._leaves is not None and not self.jobs.job(JOB):
            self._leaves = 0.0

    def _token(self, uid: str) -> Path:
        path = self.folder / f"token-{uid}"
        if not path.exists():
            spec = {"audiences": [REPORT_AUDIENCE], "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": f"{JOB}-0", "uid": uid}}
            core = client.CoreV1Api(self.jobs.api.client)
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
            path.write_text(core.create_namespaced_service_account_token(SERVICE_ACCOUNT, self.jobs.namespace, body).status.token)
        return path

    def report(self) -> Report:
        runs = self.state is State.RUNNING
        report = Report(
            job=JobIdentity(JOB, self.jobs.namespace, self._uid), pod=f"{JOB}-0", sequence=time.time_ns(), attempt=self.attempt,
            restarts=len(self.history), state=self.state, message="all ranks run" if runs else "stopped", stop=self.stop,
            nodes=tuple(NodeReport(n, n != self.lost, 1) for n in range(self.nodes)),
                ranks=RankCount(self.nodes, self.nodes if runs else 0),
            restarts_counted=len(self.history), history=self.history, preflight=self.preflight,
                log=("[rank 0] done",) if self._told != self._news else (),
        )  # fmt: skip
        return replace(report, **self.more)

    def until(self, what: str, look: Callable[[], Any], seconds: float = 180.0) -> Any:
        """The first result that is true, while the job is played."""
        end, pause = time.monotonic() + seconds, SHORTEST_PAUSE_SECONDS
        while time.monotonic() < end:
            self.tick()
            found = look()
            if found:
                return found
            pause = SHORTEST_PAUSE_SECONDS if self.wait(pause) else min(pause * 1.5, REPORT_SECONDS)
        raise AssertionError(f"{what} did not happen in {seconds:.0f} s; status is {self.jobs.job(JOB).get('status')}")

    def is_(self, condition: str, status: str = "True") -> bool:
        return bool(self.jobs.condition(JOB, condition).get("status") == status)

    def runs(self) -> bool:
        """All of this attempt is in status."""
        status = self.jobs.job(JOB).get("status") or {}
        reason = next((c["reason"] for c in status.get("conditions", []) if c["type"] == "Progressing"), "")
        here = (status.get("attempts"), (status.get("ranks") or {}).get("ready"))
        return self.state is State.RUNNING and reason == "Running" and here == (self.attempt, self.nodes)

    def uids(self, kind: str) -> dict[str, str]:
        version = dict(CHILDREN)[kind]
        items = self.jobs.kind(kind, version).get(namespace=self.jobs.namespace).to_dict()["items"]
        return {item["metadata"]["name"]: item["metadata"]["uid"] for item in items}

    def state_of_everything(self, events: bool = True) -> str:
        """The job, its events and all in its namespace as text, without what differs between two runs of the same story."""
        items = [self.jobs.job(JOB)]
        for kind, version in CHILDREN:
            found = self.jobs.kind(kind, version).get(namespace=self.jobs.namespace).to_dict()["items"]
            items += [{**item, "kind": kind} for item in sorted(found, key=lambda item: str(item["metadata"]["name"]))]
        plain = [_plain(item) for item in items if item and item["metadata"]["name"] != "kube-root-ca.crt"]
        return _normalised([*plain, *(self.events() if events else ())], self.jobs.namespace)

    def events(self) -> list[dict[str, Any]]:
        """Events of the job, as a set, except those that depend on how soon the operator saw the namespace."""
        found = client.CoreV1Api(self.jobs.api.client).list_namespaced_event(
            self.jobs.namespace, field_selector=f"involvedObject.kind=TrainingJob,involvedObject.name={JOB}"
        )
        told = {(e.type, e.reason, _COUNTED.sub("PODS", e.message)) for e in found.items if e.reason != "ServiceAccountNotFound"}
        return [{"event": list(event)} for event in sorted(told)]

    def end(self) -> None:
        """Take it away, with nobody's help."""
        self.jobs.end(JOB)
        core = client.CoreV1Api(self.jobs.api.client)
        for pod in self.jobs.pods(JOB):
            with contextlib.suppress(ApiException):
                core.delete_namespaced_pod(pod["metadata"]["name"], self.jobs.namespace, grace_period_seconds=0)


def _node_for(pod: dict[str, Any]) -> str:
    """Choose a node as the scheduler would: each pod on another node, and on none that its affinity rules out."""
    ruled_out = json.dumps((pod["spec"].get("affinity") or {}).get("nodeAffinity"))
    free = [node for node in NODES if node not in ruled_out]
    return free[int(pod["metadata"]["name"].rpartition("-")[2]) % len(free)]


_COUNTED = re.compile(r"\d+ pods? (is|are) still there|\bpods? x-\d(, x-\d)*(?=: image)")
"""Numbers of pods in messages that depend on the moment: pods that are there, or that can't pull their image."""


def _ends(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


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
    if item["kind"] == "TrainingJob":  # seconds by the clock, left out while they round to none
        kept.get("status", {}).pop("active", None)
    if item["kind"] == "Secret":
        kept["data"] = sorted(item["data"])
    return {**kept, "metadata": metadata}


def _normalised(items: list[dict[str, Any]], namespace: str) -> str:
    text = json.dumps(items, indent=1, sort_keys=True).replace(namespace, "NAMESPACE")
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "UID", text)
    hashes = set(re.findall(rf"{JOB}-run-([0-9a-z]+)", text))
    for found in hashes:
        text = text.replace(found, "HASH")
    text = re.sub(rf"{JOB}-agents-UID-[0-9a-f]+", f"{JOB}-agents-UID-MARK", text)
    text = re.sub(r'("lockstep.dev/run-proof": )"[0-9a-f]+"', r'\1"PROOF"', text)
    text = re.sub(r'("\w+Seconds": )\d+', r"\1SECONDS", text)
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME", text)
