"""Whether the operator of a namespace is heard, as far as the asker may see."""

from __future__ import annotations

import asyncio

from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, ApiError, Cluster
from lockstep.plan.pages.freshness import Unheard, unheard_of


async def operator_unheard(cluster: Cluster, namespace: str) -> Unheard | None:
    """None: it is heard, there is none, or its Lease can't be seen. Raises ApiError and OSError."""
    found = await asyncio.gather(*(_lease(cluster, place) for place in dict.fromkeys((namespace, OPERATOR_NAMESPACE))))
    lease = next((one for one in found if one is not None), None)
    return None if lease is None else unheard_of(lease, cluster.clock.now())


async def _lease(cluster: Cluster, namespace: str) -> Object | None:
    try:
        return await cluster.get("Lease", namespace, OPERATOR_NAME)
    except ApiError as error:
        if error.status == FORBIDDEN:
            return None
        raise
