"""Short-lived pods that look at nodes from inside: started together, read, removed whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from base64 import b64encode

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.expiry import expiring
from lockstep.plan.cluster.facts import ClusterFacts, ProbeFacts
from lockstep.plan.discovery.probe import PROBE_LABEL, WAIT_SECONDS, probe_name, probe_pods, read_probe
from lockstep.plan.waiting.containers import OF_A_HELPER
from lockstep.platforms.agentfile import build_agent
from lockstep.platforms.clusters.waits import Stuck, why_pods_wait

POLL_SECONDS = 1.0
LOG_BYTES_MAX = 1 << 20
_OVER = ("Succeeded", "Failed")


async def probe_nodes(cluster: Cluster, facts: ClusterFacts, image: str) -> tuple[ProbeFacts, ...]:
    """Facts that a pod on each node saw. Raises ConfigError when the API server refuses such a pod."""
    token = secrets.token_hex(3)
    pods = list(probe_pods(facts, token, image))
    metadata = {"name": probe_name(token), "namespace": facts.namespace, "labels": {PROBE_LABEL: token}}
    data = {"agent.pyz": b64encode(build_agent()).decode()}
    items: list[Object] = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}, *pods]
    async with expiring(cluster, facts.namespace, probe_name(token), image) as owner:
        try:
            for item in items:
                item["metadata"]["ownerReferences"] = [] if owner is None else [owner]
                await _create(cluster, item)
            ended = await _ended(cluster, facts.namespace, token, len(pods))
            return tuple([read_probe(pod, await _log(cluster, pod), why) for pod, why in ended])
        finally:
            for item in reversed(items):  # (one that was being created when this was interrupted, too)
                await cluster.delete(item["kind"], facts.namespace, item["metadata"]["name"], grace_seconds=0)


async def _create(cluster: Cluster, item: Object) -> None:
    try:
        await cluster.create(item)
    except ApiError as error:
        raise ConfigError(f"the API server refused {item['kind']} {item['metadata']['name']} of the probe: {error.message}") from None


async def _ended(cluster: Cluster, namespace: str, token: str, count: int) -> list[tuple[Object, str]]:
    """Return the pods as they are when all have ended, can't start without help, or time is up, each with what keeps it from running."""
    end, stuck = time.monotonic() + WAIT_SECONDS, Stuck()
    while True:
        pods: list[Object] = (await cluster.list("Pod", namespace, {"labelSelector": f"{PROBE_LABEL}={token}"}))["items"]
        left = [pod for pod in pods if pod.get("status", {}).get("phase") not in _OVER]
        waits = await why_pods_wait(cluster, namespace, left, OF_A_HELPER)
        lasting = [wait.lasting for wait in waits.values() if wait.lasting]
        is_stuck = stuck.lasts(lasting[0] if lasting and len(lasting) == len(left) else "")
        if len(pods) - len(left) >= count or is_stuck or time.monotonic() > end:
            named = {str(pod["metadata"]["name"]): pod for pod in pods}
            return [(named[name], waits[name].message if name in waits else "") for name in sorted(named)]
        await asyncio.sleep(POLL_SECONDS)


async def _log(cluster: Cluster, pod: Object) -> list[str]:
    lines: list[str] = []
    with contextlib.suppress(ApiError, OSError):
        async for line in cluster.log(pod["metadata"]["namespace"], pod["metadata"]["name"], "probe", {"limitBytes": str(LOG_BYTES_MAX)}):
            lines.append(line)
    return lines
