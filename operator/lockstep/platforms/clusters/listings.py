"""Reads of a cluster with one person's rights: 403 and 404 become a Listing that says so, and every other refusal raises ApiError."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.api.names import API_VERSION
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster
from lockstep.plan.cluster.facts import Listing, Sight

SIGHTS = {FORBIDDEN: Sight.FORBIDDEN, NOT_FOUND: Sight.NO_SUCH_KIND}


async def list_kind(cluster: Cluster, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None) -> Listing:
    """All objects of a kind in one namespace, or in all."""
    try:
        return Listing(kind, tuple((await cluster.list(kind, namespace, query))["items"]))
    except ApiError as error:
        if error.status not in SIGHTS:
            raise
        return Listing(kind, sight=SIGHTS[error.status])


async def read_object(cluster: Cluster, kind: str, namespace: str | None, name: str) -> Listing:
    """The object of this name. Of Secrets and ConfigMaps only whether it is there, never what is in it."""
    try:
        if kind not in ("Secret", "ConfigMap"):
            item = await cluster.get(kind, namespace, name)
        else:
            item = {"metadata": {"name": name}} if await cluster.exists(kind, namespace, name) else None
    except ApiError as error:
        if error.status != FORBIDDEN:
            raise
        return Listing(kind, sight=Sight.FORBIDDEN)
    return Listing(kind, () if item is None else (item,))


async def sight_of_jobs(cluster: Cluster) -> Sight:
    """SEEN if the API server knows TrainingJobs: everybody may ask which kinds there are."""
    try:
        await cluster.request("GET", f"/apis/{API_VERSION}")
    except ApiError as error:
        if error.status not in SIGHTS:
            raise
        return SIGHTS[error.status]
    return Sight.SEEN
