"""A job and what is around it, as the account of whoever asks may see them, and whether the operator still writes its status."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from lockstep.api.names import LABEL_JOB, OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.kube.cluster import Cluster
from lockstep.plan.cluster.facts import Listing, Sight
from lockstep.plan.observed import Observed
from lockstep.plan.pages.table import Unheard, unheard_of
from lockstep.platforms.clusters.listings import list_kind, read_object

KINDS_OF_A_JOB = ("StatefulSet", "Service", "NetworkPolicy", "ConfigMap")


class JobObserver:
    """Lists with the asker's rights, each asked for once. `not_seen` has one sentence for everything that was refused."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lists: dict[tuple[str, str | None, str], asyncio.Task[Listing]] = {}
        self.not_seen: list[str] = []

    async def all(self, kind: str, namespace: str | None, query: Mapping[str, str] | None = None) -> Listing:
        """List objects of one kind, as `list_kind` does."""
        key = kind, namespace, str(query)
        if key not in self._lists:
            self._lists[key] = asyncio.ensure_future(list_kind(self._cluster, kind, namespace, query))
        listing = await self._lists[key]
        refusal = f"{kind}s {f'in namespace {namespace}' if namespace else 'of the cluster'}: your account may not list them"
        if listing.sight is Sight.FORBIDDEN and refusal not in self.not_seen:
            self.not_seen.append(refusal)
        return listing

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
        stuck = any(map(scheduler_message, pods.items))
        return Observed(
            job=job,
            objects={(listing.kind, str(item["metadata"]["name"])): item for listing in objects for item in listing.items},
            pods=tuple(sorted(pods.items, key=lambda pod: str(pod["metadata"]["name"]))),
            nodes=(await self.all("Node", None)).items if stuck else (),
            claims={str(item["metadata"]["name"]): item for item in claims.items},
            sees_claims=claims.seen,
            warnings=warnings.items,
            others=await self._others(namespace, name) if stuck else (),
            unused=unused((await self.all("TrainingJob", namespace)).items) if stuck else frozenset(),
        )

    async def _others(self, namespace: str, job: str) -> tuple[Object, ...]:
        """Pods that may hold what the job lacks: of all namespaces, or of its own if your account may list no others."""
        from lockstep.plan.waiting.containers import is_scheduled

        pods = await self.all("Pod", None)
        if not pods.seen:
            pods = await self.all("Pod", namespace)
        mine = (namespace, job)
        return tuple(
            pod
            for pod in pods.items
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
