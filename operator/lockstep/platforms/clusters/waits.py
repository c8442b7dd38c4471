"""Reasons why pods don't run, as the cluster tells them, for every command that waits for pods."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.api.objects import Object, is_running
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.cluster.facts import Listing
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed
from lockstep.plan.waiting.containers import Hints, is_scheduled, lasts, missing_object
from lockstep.plan.waiting.unscheduled import why_waiting
from lockstep.platforms.clusters.listings import list_kind, read_object

STUCK_SECONDS = 8.0
"""A pod that can't start for so long won't by itself."""


class Wait(NamedTuple):
    """Reason why a pod doesn't run yet; '' for none."""

    message: str = ""
    lasting: str = ""
    """The reason in one word, if it doesn't pass by itself."""


async def why_pods_wait(cluster: Cluster, namespace: str, pods: Sequence[Object], hints: Hints) -> dict[str, Wait]:
    """Return what keeps pods from running, by the pod's name, for each that waits for something that is wrong.

    Events and claims count as far as your account may see them; while the API server has no time for them, nothing is known. Raises
    ApiError.
    """
    waiting = [pod for pod in pods if not is_running(pod)]
    if not waiting:
        return {}
    try:
        events, claims = await list_kind(cluster, "Event", namespace, {"fieldSelector": "type=Warning"}), Listing("PersistentVolumeClaim")
        if not all(map(is_scheduled, waiting)):
            claims = await list_kind(cluster, claims.kind, namespace)
        known = {str(item["metadata"]["name"]): item for item in claims.items}
        observed = [Observed(job=pod, pods=(pod,), warnings=events.items, claims=known, sees_claims=claims.seen) for pod in waiting]
        whys = [(one.pods[0], why) for one in observed if (why := why_waiting(one, hints)) is not None]
        return {str(pod["metadata"]["name"]): Wait(why.message, await _lasting(cluster, namespace, pod, why)) for pod, why in whys}
    except ApiError as error:
        if not error.is_overload:
            raise
        return {}


async def _lasting(cluster: Cluster, namespace: str, pod: Object, why: Notice) -> str:
    """Return the reason if it doesn't pass by itself, else ''. A missing object counts while the API server lacks it: a kubelet sees a new
    one late.
    """
    missing = missing_object(why)
    if missing is None:
        return why.reason if lasts(why, pod) else ""
    listing = await read_object(cluster, missing[0], namespace, missing[1])
    return why.reason if listing.seen and listing.first is None else ""


class Stuck:
    """Memory of what keeps pods from running, between looks at them."""

    def __init__(self) -> None:
        self._reason, self._since = "", 0.0

    def lasts(self, reason: str) -> bool:
        """Return True if every look has found this reason for STUCK_SECONDS; '' is none."""
        now = asyncio.get_running_loop().time()
        if reason != self._reason:
            self._reason, self._since = reason, now
        return bool(reason) and now - self._since >= STUCK_SECONDS
