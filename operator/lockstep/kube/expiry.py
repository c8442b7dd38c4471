"""Objects of a command that go by themselves when it is killed: they belong to a Job without pods, which the command keeps from expiring.

    async with expiring(cluster, namespace, "demo-preflight", image) as owner:
        ...  # create objects with `owner` among their ownerReferences

A Job with `parallelism: 0` runs nothing. Kubernetes ends it at `activeDeadlineSeconds`, removes it (`ttlSecondsAfterFinished`), and then
all that belongs to it. This needs no right beyond the built-in role `edit`, and no process of Lockstep: if a laptop is shut or the command
gets SIGKILL, the deadline just isn't moved any further.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lockstep.api import names
from lockstep.api.objects import Object
from lockstep.kube.cluster import MERGE, ApiError, Cluster
from lockstep.kube.kinds import path_of
from lockstep.programs import meanwhile

LEFT_SECONDS = 120
"""Time until all is gone after the command was killed. The job of a proxy or an API server that is away for a minute must not end by that.
"""
BEAT_SECONDS = 30.0
REMOVAL_SECONDS = 10.0
"""Limit for each removal at the end of a command: where the API server doesn't answer, nobody waits for what goes by itself."""
EXPIRY = f"{names.APP}-expiry"
NAME_MAX = 40


@asynccontextmanager
async def expiring(cluster: Cluster, namespace: str, name: str, image: str, owners: Sequence[Object] = ()) -> AsyncIterator[Object | None]:
    """The ownerReference for what is made; None where the cluster refuses the Job. Leaving removes it all, whatever happens.

    `owners`: what the Job itself belongs to. An object with several owners stays until the last one is gone, so what is made gets none of
    them.
    """
    job = expiry_job(namespace, f"{name[:NAME_MAX].rstrip('-')}-expiry-{secrets.token_hex(3)}", image)
    job["metadata"]["ownerReferences"] = list(owners)
    try:
        created = await cluster.create(job)
    except ApiError as error:
        if not error.is_refusal:
            raise
        created = None
    if created is None:
        yield None
        return
    name, uid = created["metadata"]["name"], created["metadata"]["uid"]
    try:
        async with meanwhile(_beat(cluster, namespace, name)):
            yield {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}
    finally:
        with contextlib.suppress(ApiError, OSError):  # it expires by itself
            async with asyncio.timeout(REMOVAL_SECONDS):
                await cluster.delete("Job", namespace, name, uid)


def expiry_job(namespace: str, name: str, image: str) -> Object:
    """It never has a pod; what stands of one satisfies Pod Security `restricted`, which looks at it all the same."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    container = {"name": "none", "image": image, "command": ["true"], "securityContext": security}
    pod = {"containers": [container], "restartPolicy": "Never", "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}}
    spec = {"parallelism": 0, "activeDeadlineSeconds": LEFT_SECONDS, "ttlSecondsAfterFinished": 0, "template": {"spec": pod}}
    metadata = {"name": name, "namespace": namespace, "labels": {names.LABEL_NAME: EXPIRY}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


async def _beat(cluster: Cluster, namespace: str, name: str) -> None:
    begun = time.monotonic()
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        seconds = int(time.monotonic() - begun) + LEFT_SECONDS
        with contextlib.suppress(ApiError, OSError):
            await cluster.request("PATCH", path_of("Job", namespace, name), {"spec": {"activeDeadlineSeconds": seconds}}, None, MERGE)
