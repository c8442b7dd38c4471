"""A folder of this machine that is sent to the pods of a job."""

from __future__ import annotations

from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import CONTAINER, LABEL_JOB, pod_name
from lockstep.api.objects import claim_names, current_status, has_ended, is_running
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import PodPlace
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.files.sending import Sending, send_all, send_once
from lockstep.platforms.files.sync import Receivers, Synced
from lockstep.platforms.kubernetes.backend import known_job


async def sync(target: Target, sending: Sending) -> bool:
    """Sync to all pods of a job. Return True if each has everything; with `watch` return never."""
    namespace = target.namespace

    async def send() -> list[Synced]:
        places = await _places(cluster, namespace, sending.job)
        return await send_once(receivers, places, dict.fromkeys(places, sending.to), sending)

    async with target.client.connected() as cluster, Receivers() as receivers:
        return await send_all(sending, receivers, send, lambda: _is_over(cluster, namespace, sending.job))


async def _is_over(cluster: Cluster, namespace: str, job: str) -> bool:
    """Return True if the job was deleted or has ended, so that nothing can be sent to it any more."""
    try:
        found = await cluster.get("TrainingJob", namespace, job)
        if found:
            return has_ended(current_status(found))
        names = {"StatefulSet": job, "Pod": pod_name(job, 0)}
        return not any([await cluster.get(kind, namespace, name) for kind, name in names.items()])
    except (ApiError, OSError):
        return False


async def _places(cluster: Cluster, namespace: str, job: str) -> dict[str, PodPlace]:
    """Return the pods that run, by name; one of them where all share their volumes. Raises ConfigError when none runs."""
    pods: list[dict[str, Any]] = (await cluster.list("Pod", namespace, {"labelSelector": f"{LABEL_JOB}={job}"}))["items"]
    running = sorted(pod["metadata"]["name"] for pod in pods if is_running(pod) and "deletionTimestamp" not in pod["metadata"])
    if not running:
        await known_job(cluster, namespace, job)
        raise ConfigError(f"no pod of job {job} runs: lockstep why {job} -n {namespace}")
    if len(running) < len(pods):
        waiting = sorted({pod["metadata"]["name"] for pod in pods} - set(running))
        raise Failed(f"{', '.join(waiting)} of job {job} doesn't run yet; nothing was sent, so that no pod is left behind")
    has_own = any(claim.endswith(pods[0]["metadata"]["name"]) for claim in claim_names(pods[0]))  # a claim of one pod ends with its name
    chosen = running if has_own else running[:1]
    return {name: PodPlace(cluster, namespace, name, CONTAINER) for name in chosen}
