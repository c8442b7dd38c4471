"""TrainingJobs as a person at a terminal handles them: apply anew, read the status."""

from __future__ import annotations

import time
from typing import Any

from lockstep.api.job import TrainingJob
from lockstep.api.names import GROUP, VERSION
from lockstep.plan.readstatus import is_true

PLURAL = "trainingjobs"
GONE_TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.2


def _objects(client: Any) -> Any:
    from kubernetes.client import CustomObjectsApi

    return CustomObjectsApi(client)


def get_job(client: Any, namespace: str, name: str) -> dict[str, Any] | None:
    """The job as the API server has it; None when there is none."""
    from kubernetes.client.exceptions import ApiException

    try:
        found: dict[str, Any] = _objects(client).get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
    except ApiException as error:
        if error.status == 404:
            return None
        raise
    return found


def list_jobs(client: Any, namespace: str) -> list[dict[str, Any]]:
    """Every job of the namespace; none where the CRDs are not installed."""
    from kubernetes.client.exceptions import ApiException

    try:
        found: list[dict[str, Any]] = _objects(client).list_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL)["items"]
    except ApiException as error:
        if error.status == 404:
            return []
        raise
    return found


def patch_spec(client: Any, namespace: str, name: str, spec: dict[str, Any]) -> None:
    """Change fields of the spec; what the API server refuses is raised in its words."""
    _objects(client).patch_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name, {"spec": spec})


def job_events(client: Any, namespace: str, name: str) -> list[dict[str, Any]]:
    """Events about the job itself, the oldest first."""
    from kubernetes.client import CoreV1Api

    selector = f"involvedObject.kind=TrainingJob,involvedObject.name={name}"
    found = client.sanitize_for_serialization(CoreV1Api(client).list_namespaced_event(namespace, field_selector=selector))["items"]
    return sorted(found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))


def job_status(client: Any, namespace: str, name: str) -> dict[str, Any]:
    """The job's status; empty when there is no job or no status yet."""
    status: dict[str, Any] = (get_job(client, namespace, name) or {}).get("status", {})
    return status


def has_ended(status: dict[str, Any]) -> bool:
    """Whether a terminal condition holds."""
    return is_true(status, "Complete") or is_true(status, "Failed")


def delete_job(client: Any, namespace: str, name: str) -> None:
    """Delete the job and wait until it is gone; its claims stay.

    Raises:
        TimeoutError: it is still there after a minute.
    """
    if get_job(client, namespace, name) is None:
        return
    _objects(client).delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name, propagation_policy="Foreground")
    deadline = time.monotonic() + GONE_TIMEOUT_SECONDS
    while get_job(client, namespace, name) is not None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"TrainingJob {namespace}/{name} is still there {GONE_TIMEOUT_SECONDS:.0f} s after its deletion")
        time.sleep(POLL_SECONDS)


def replace_job(client: Any, namespace: str, job: TrainingJob) -> None:
    """Create the job; one of the same name is deleted first."""
    delete_job(client, namespace, job.metadata.name)
    body = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    body |= {"apiVersion": job.api_version, "kind": job.kind}
    _objects(client).create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, body)
