"""A cluster's API server with one job of each state, so that verbs about jobs do their work without a cluster."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.api_stub import ALWAYS, ApiStub, Object, served

NAMESPACE = "team"
MOMENT = "2026-11-22T20:00:00Z"
JOBS = f"/apis/lockstep.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs"
ALL_JOBS = "/apis/lockstep.dev/v1alpha1/trainingjobs"


def condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": MOMENT}


RUNNING = (
    condition("Progressing", "True", "Running", "all ranks run"),
    condition("Suspended", "False", "NotSuspended", "spec.suspend is false"),
)
STOPPED = (condition("Suspended", "True", "Suspended", "saved at step 7"), condition("Progressing", "False", "Suspended", "it is stopped"))
ENDED = "rank 1 on node 1 exited with 1: ValueError: no such column"
COMPLETE = (
    condition("Complete", "True", "Complete", "all ranks are done"),
    condition("Progressing", "False", "Complete", "all ranks are done"),
    RUNNING[1],
)
FAILED = (condition("Failed", "True", "RanksFailed", ENDED), condition("Progressing", "False", "RanksFailed", ENDED), RUNNING[1])


def a_job(name: str, *conditions: Object, **spec: Any) -> Object:
    """A TrainingJob as its operator has left it."""
    metadata = {"name": name, "namespace": NAMESPACE, "uid": name, "resourceVersion": "1", "generation": 1, "creationTimestamp": MOMENT}
    status = {
        "conditions": list(conditions), "observedGeneration": 1, "nodes": 2, "attempts": 1, "restarts": 0, "startTime": MOMENT,
        "ranks": {"desired": 2, "ready": 2}, "trainer": {"step": 7, "totalSteps": 20, "metrics": [{"name": "loss", "value": "0.8642"}]},
        "cluster": {"name": "local", "transport": "TCP"}, "checkpoint": {"lastCommittedStep": 7, "lastCommitTime": MOMENT},
    }  # fmt: skip
    work = {"cluster": "local", "nodes": 2, "script": {"path": "/workspace/a.py"}, **spec}
    return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": work, "status": status}


def a_pod(job: str, node: int) -> Object:
    """A pod of a job whose ranks run."""
    labels = {"lockstep.dev/job": job, "apps.kubernetes.io/pod-index": str(node)}
    container = {"name": "trainer", "ready": True, "restartCount": 0, "state": {"running": {"startedAt": MOMENT}}}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": f"{job}-{node}", "namespace": NAMESPACE, "uid": f"{job}-{node}", "labels": labels,
            "creationTimestamp": MOMENT},
        "spec": {"nodeName": f"node-{node}", "containers": [{"name": "trainer", "image": "lockstep-trainer"}]},
        "status": {"phase": "Running", "containerStatuses": [container], "conditions": [{"type": "Ready", "status": "True"}]},
    }  # fmt: skip


@dataclass
class Cluster(ApiStub):
    """Jobs that can be read, changed and deleted; a job that is suspended has saved at the next look."""

    jobs: dict[str, Object] = field(default_factory=dict)
    with_pods: bool = False
    """Do the pods of `bakery` run?"""
    changed: list[tuple[str, str, Any]] = field(default_factory=list)
    """(method, job, what was written of its spec) in their order."""

    def __post_init__(self) -> None:
        jobs = [a_job("bakery", *RUNNING), a_job("halted", *STOPPED, suspend=True), a_job("done", *COMPLETE), a_job("broken", *FAILED)]
        self.jobs = {job["metadata"]["name"]: job for job in [*jobs, *(a_job(name, *RUNNING) for name in ("halt", "grow", "gone"))]}
        event = {
            "metadata": {"name": "e", "namespace": NAMESPACE, "uid": "e"}, "type": "Normal", "reason": "Started",
                "message": "attempt 1 starts",
            "involvedObject": {"kind": "TrainingJob", "name": "bakery", "uid": "bakery"}, "lastTimestamp": MOMENT,
        }  # fmt: skip
        pods = [a_pod("bakery", node) for node in (0, 1) if self.with_pods]
        lists = {"events": [event], "pods": pods}
        core = f"/api/v1/namespaces/{NAMESPACE}"
        self.objects = {
            f"{core}/{plural}": {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items} for plural, items in lists.items()
        }
        self.objects |= {f"{core}/pods/{pod['metadata']['name']}": pod for pod in pods}

    def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:  # noqa: PLR0911 (one return a kind of answer)
        plural = self.plural(path)
        if path.endswith("/log"):
            return 200, f"{MOMENT} [rank 0] Step 7/20 | Loss: 0.8642\n"
        if plural == "selfsubjectaccessreviews" and isinstance(body, dict):
            return 201, {**body, "status": {"allowed": True}}
        if method == "POST" and isinstance(body, dict) and "metadata" in body:
            return 201, {**body, "metadata": {"uid": "new", "resourceVersion": "1", **body["metadata"]}}
        if plural != "trainingjobs" or path in ALWAYS:
            return super().answer(method, path, body)
        name = path.removeprefix(f"{JOBS}/").removesuffix("/status")
        if method == "GET" and path in (JOBS, ALL_JOBS):
            return 200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": list(self.jobs.values())}
        if name not in self.jobs:
            return super().answer(method, path, body)
        if method in ("PATCH", "DELETE"):
            return 200, self._change(method, name, body.get("spec", {}) if isinstance(body, dict) else {})
        return 200, self.jobs[name]

    def _change(self, method: str, name: str, spec: Object) -> Object:
        self.changed.append((method, name, spec))
        if method == "DELETE":
            return self.jobs.pop(name)
        job = copy.deepcopy(self.jobs[name])
        job["spec"] |= spec
        if "suspend" in spec:
            job["status"]["conditions"] = list(STOPPED if spec["suspend"] else RUNNING)
        self.jobs[name] = job
        return job


@contextmanager
def a_cluster(folder: Path, *, with_pods: bool) -> Iterator[tuple[Cluster, Path]]:
    """Serve such a cluster, with a kubeconfig for it whose namespace has the jobs."""
    stub = Cluster(with_pods=with_pods)
    folder.mkdir(parents=True, exist_ok=True)
    with served(stub, folder) as path:
        yield stub, path
