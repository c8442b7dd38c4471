"""TrainingJobs as a person at a terminal handles them: apply anew, read the status."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lockstep.api.names import API_VERSION, LABEL_JOB, LABEL_RUN, RUN_KEY, run_name
from lockstep.api.objects import uid_of
from lockstep.kube.cluster import FORBIDDEN, MERGE, NOT_FOUND, ApiError, Client, Cluster
from lockstep.kube.kinds import path_of

GONE_TIMEOUT_SECONDS = 60.0
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
POLL_SECONDS = 0.2


def _read(
    client: Client, kind: str, namespace: str | None, name: str | None = None, query: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return the object or the list; None where there is no such object, or no such kind."""
    try:
        return client.request("GET", path_of(kind, namespace, name), None, query)
    except ApiError as error:
        if error.status == NOT_FOUND or (error.status == FORBIDDEN and kind == "TrainingJob" and not _is_served(client)):
            return None
        raise


def _is_served(client: Client) -> bool:
    """Return False without the CRDs: then no role names TrainingJobs, and the API server refuses before it finds that there are none."""
    try:
        client.request("GET", f"/apis/{API_VERSION}")
    except ApiError as error:
        return error.status != NOT_FOUND
    return True


def get_job(client: Client, namespace: str, name: str) -> dict[str, Any] | None:
    """The job as the API server has it; None when there is none."""
    return _read(client, "TrainingJob", namespace, name)


def list_jobs(client: Client, namespace: str | None, selector: str | None = None) -> list[dict[str, Any]]:
    """Every job of the namespace, None: of all; without CRDs, or the right to list TrainingJobs, only runs of --in-namespace. `selector`:
    TrainingJobs by labels, in kubectl's words.
    """
    query = None if selector is None else {"labelSelector": selector}
    runs = runs_without_operator(client, namespace) if selector is None else []
    try:
        jobs = list((_read(client, "TrainingJob", namespace, None, query) or {"items": []})["items"])
    except ApiError as error:
        if error.status != FORBIDDEN or not runs:
            raise
        return runs
    return [*jobs, *runs]


def runs_without_operator(client: Client, namespace: str | None, name: str | None = None) -> list[dict[str, Any]]:
    """Runs of `lockstep run --in-namespace`, as far as one may see them, in the shape of TrainingJobs, for what reads a job's files.
    `namespace` None: of all.
    """
    selector = LABEL_RUN if name is None else f"{LABEL_JOB}={name}"
    try:
        found = _read(client, "ConfigMap", namespace, None, {"labelSelector": selector}) or {"items": []}
    except ApiError:
        return []
    runs = {}
    for item in found["items"]:
        own = item["metadata"]
        run, job = own["name"], (own.get("labels") or {}).get(LABEL_JOB, "")
        if not run.startswith(run_name(job, "")) or own.get("ownerReferences"):
            continue
        # Those who may write ConfigMaps may have written anything.
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            frozen = json.loads(item["data"][RUN_KEY])
            metadata = {"name": job, "namespace": own["namespace"], "uid": str(frozen["job"]["uid"])}
            spec = {"restart": {"retry": int(frozen.get("restart", {}).get("retry", 0))}}
            runs[own["namespace"], job] = {"kind": "ConfigMap", "metadata": metadata, "spec": spec, "status": {"run": {"name": run}}}
    return [runs[key] for key in sorted(runs)]


def patch_spec(client: Client, namespace: str, name: str, spec: dict[str, Any]) -> None:
    """Change fields of the spec; what the API server refuses is raised in its words."""
    client.request("PATCH", path_of("TrainingJob", namespace, name), {"spec": spec}, None, MERGE)


def job_events(client: Client, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Events about the job itself, the oldest first; not those of an earlier one of its name."""
    namespace, selector = job["metadata"]["namespace"], f"involvedObject.uid={job['metadata']['uid']}"
    events = (_read(client, "Event", namespace, None, {"fieldSelector": selector}) or {"items": []})["items"]
    return sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))


async def delete_job(cluster: Cluster, namespace: str, name: str) -> None:
    """Delete the job and wait until it is gone, or another one has its name; its claims stay.

    Raises:
        TimeoutError: it is still there after a minute.
    """
    if (job := await cluster.get("TrainingJob", namespace, name)) is None:
        return
    await cluster.request("DELETE", path_of("TrainingJob", namespace, name), {"propagationPolicy": "Foreground"})
    deadline = time.monotonic() + GONE_TIMEOUT_SECONDS
    while (left := await cluster.get("TrainingJob", namespace, name)) is not None and uid_of(left) == uid_of(job):
        if time.monotonic() > deadline:
            raise TimeoutError(f"TrainingJob {namespace}/{name} is still there {GONE_TIMEOUT_SECONDS:.0f} s after its deletion")
        await asyncio.sleep(POLL_SECONDS)


def with_last_applied(document: dict[str, Any]) -> dict[str, Any]:
    """The object as `kubectl apply` creates it: with what was applied in the annotation that its next comparison is made with."""
    applied = {**document, "metadata": {"annotations": {}, **document["metadata"]}}
    annotations = {LAST_APPLIED: f"{json.dumps(applied, separators=(',', ':'), sort_keys=True)}\n"}
    return {**document, "metadata": {**document["metadata"], "annotations": annotations}}
