"""Files of this machine and of the volumes of a job in pods: copies, and a folder that is sent again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import CONTAINER, KUBERNETES, LABEL_JOB, pod_name
from lockstep.api.objects import claim_names, current_status, has_ended, is_running
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import PodPlace
from lockstep.plan.render.readerpod import is_shared
from lockstep.plan.render.resolved import Resolved
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.files.copies import Copy, CopyWish, tell_result
from lockstep.platforms.files.meter import Meter
from lockstep.platforms.files.reader import beside, nodes_with_volumes, place_roots, reader, stateful_set_before_start
from lockstep.platforms.files.sending import Sending, send_all, send_once
from lockstep.platforms.files.sync import Receivers, Synced
from lockstep.platforms.files.transfer import Carried, Sender, TransferProgress, get, put, refuse_outside
from lockstep.platforms.jobs.resolved import resolve_with_warnings
from lockstep.platforms.kubernetes.job import known_job
from lockstep.platforms.output import tell
from lockstep.platforms.places.orders import lack


async def copy_in_pods(copy: Copy, target: Target, wish: CopyWish) -> bool:
    """Copy, and return True if everything arrived."""
    if wish.origin is not None:
        raise lack(KUBERNETES, "--from")
    name, namespace, node = copy.remote.job, target.namespace, wish.node
    sender = copy.sender(None, force=wish.force) if copy.up else None
    before = None if wish.job is None or wish.cluster is None else resolve_with_warnings(wish.job, wish.cluster, namespace)
    async with target.client.connected() as cluster:
        if before is not None and await cluster.get("StatefulSet", namespace, name) is None:
            return await _copy_before_start(cluster, copy, before, node, sender)
        await known_job(cluster, namespace, name, f"; before its first start: lockstep cp -f FILE SRC {name}:")
        volumes = await nodes_with_volumes(cluster, namespace, name)
        if node is not None and node not in volumes and volumes != [0]:
            raise ConfigError(f"job {name} has no volume of node {node}: it has those of {', '.join(map(str, volumes))}")
        return await _copy_to(copy, volumes, node, lambda number: beside(cluster, namespace, name, number, say=tell), sender)


async def _copy_before_start(cluster: Cluster, copy: Copy, job: Resolved, node: int | None = None, sender: Sender | None = None) -> bool:
    """Copy to or from the volumes that the job will have. Missing claims are created, and short-lived pods mount them."""
    stateful_set = await stateful_set_before_start(cluster, job)
    volumes = [0] if is_shared(stateful_set) else [*range(job.nodes)]
    return await _copy_to(copy, volumes, node, lambda number: reader(cluster, stateful_set, number, say=tell), sender)


async def _copy_to(
    copy: Copy,
    volumes: list[int],
    node: int | None,
    place_of: Callable[[int], AbstractAsyncContextManager[PodPlace]],
    sender: Sender | None = None,
) -> bool:
    """Copy to the volumes of all nodes, or of `node`, or from the first of them."""

    async def one(number: int) -> Carried:
        async with place_of(number) as place:
            return await _carried(copy, place, progress[f"node {number}"], sender)

    nodes = [node] if node is not None else volumes if copy.up else volumes[:1]
    with Meter() as meter:
        progress = meter.transfers = {f"node {number}": TransferProgress(meter.changed) for number in nodes}
        results = await asyncio.gather(*map(one, nodes), return_exceptions=True)
    done = [tell_result(copy, f"{copy.remote.job} node {number}", result) for number, result in zip(nodes, results, strict=True)]
    return all(done)


async def _carried(copy: Copy, place: PodPlace, progress: TransferProgress, sender: Sender | None) -> Carried:

    roots = await place_roots(place, writing=copy.up)
    refuse_outside(copy.remote.path, roots)
    if copy.up:
        return await put(place, Path(copy.local), copy.remote.path, roots, progress, sender=sender)
    return await get(place, copy.remote.path, copy.local, roots, progress)


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
