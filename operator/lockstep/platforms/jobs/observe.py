"""A job and what is around it, as the account of whoever asks may see them, and whether the operator still writes its status."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from lockstep.api.names import LABEL_JOB, OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, ApiError, Cluster
from lockstep.plan.observed import Observed
from lockstep.plan.pages.table import Unheard, unheard_of
from lockstep.platforms.clusters.listings import read_object

KINDS_OF_A_JOB = ("StatefulSet", "Service", "NetworkPolicy", "ConfigMap")


class JobObserver:
    """Lists with the asker's rights. `not_seen` has one sentence for everything that was refused."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.not_seen: list[str] = []

    async def all(self, kind: str, namespace: str | None, query: Mapping[str, str] | None = None) -> list[Object]:
        """List objects of one kind; [] when it is refused."""
        try:
            items: list[Object] = (await self._cluster.list(kind, namespace, query))["items"]
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            place = f"in namespace {namespace}" if namespace else "of the cluster"
            self.not_seen.append(f"{kind}s {place}: your account may not list them")
            return []
        return items

    async def at(self, job: Object) -> Observed:
        """Observe everything that explains the state of the job."""
        # `get` and `describe` read only the operator's Lease here: they import no models.
        from lockstep.plan.reconcile.interactive import unused
        from lockstep.plan.waiting.containers import scheduler_message

        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        own = {"labelSelector": f"{LABEL_JOB}={name}"}
        pods, claims, warnings, *objects = await asyncio.gather(
            self.all("Pod", namespace, own),
            self.all("PersistentVolumeClaim", namespace),
            self.all("Event", namespace, {"fieldSelector": "type=Warning"}),
            *(self.all(kind, namespace, own) for kind in KINDS_OF_A_JOB),
        )
        self.not_seen.sort()
        stuck = any(map(scheduler_message, pods))
        return Observed(
            job=job,
            objects={
                (kind, str(item["metadata"]["name"])): item for kind, items in zip(KINDS_OF_A_JOB, objects, strict=True) for item in items
            },
            pods=tuple(sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))),
            nodes=tuple(await self.all("Node", None)) if stuck else (),
            claims={str(item["metadata"]["name"]): item for item in claims},
            warnings=tuple(warnings),
            others=await self._others(namespace, name) if stuck else (),
            unused=unused(await self.all("TrainingJob", namespace)) if stuck else frozenset(),
        )

    async def _others(self, namespace: str, job: str) -> tuple[Object, ...]:
        """Pods that may hold what the job lacks: of all namespaces, or of its own if your account may list no others."""
        from lockstep.plan.waiting.containers import is_scheduled

        before = len(self.not_seen)
        pods = await self.all("Pod", None)
        if len(self.not_seen) > before:
            pods = await self.all("Pod", namespace)
        mine = (namespace, job)
        return tuple(
            pod
            for pod in pods
            if is_scheduled(pod) and (pod["metadata"]["namespace"], (pod["metadata"].get("labels") or {}).get(LABEL_JOB)) != mine
        )


async def operator_unheard(cluster: Cluster, namespace: str) -> Unheard | None:
    """Reason why the operator's statuses are out of date.

    None if it works, there is none, or your account may not read its Lease. Raises ApiError, OSError.
    """
    places = dict.fromkeys((namespace, OPERATOR_NAMESPACE))
    leases = await asyncio.gather(*(read_object(cluster, "Lease", place, OPERATOR_NAME) for place in places))
    lease = next((item for listing in leases for item in listing.items), None)
    return None if lease is None else unheard_of(lease, cluster.clock.now())
