"""Reads of a cluster with one person's rights, and those rights: 403 and 404 become a Listing that says so, and every other refusal raises
ApiError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from lockstep.api.names import API_VERSION
from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster, tolerated
from lockstep.kube.kinds import KINDS, path_of, type_meta
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
    with tolerated(FORBIDDEN):
        if kind not in ("Secret", "ConfigMap"):
            item = await cluster.get(kind, namespace, name)
        else:
            item = {"metadata": {"name": name}} if await cluster.exists(kind, namespace, name) else None
        return Listing(kind, () if item is None else (item,))
    return Listing(kind, sight=Sight.FORBIDDEN)


async def is_there(cluster: Cluster, item: Object) -> bool:
    """Return False where the cluster doesn't know the kind, as SCCs on plain Kubernetes. What may not be seen counts as there: to be
    removed it must be tried.
    """
    listing = await read_object(cluster, item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
    return listing.first is not None or not listing.seen


async def sight_of_jobs(cluster: Cluster) -> Sight:
    """SEEN if the API server knows TrainingJobs: everybody may ask which kinds there are."""
    try:
        await cluster.request("GET", f"/apis/{API_VERSION}")
    except ApiError as error:
        if error.status not in SIGHTS:
            raise
        return SIGHTS[error.status]
    return Sight.SEEN


async def may(cluster: Cluster, verb: str, kind: str, namespace: str | None = None, subresource: str = "") -> bool:
    """Return True if this verb is allowed on every object of the kind in the namespace; without one, in the whole cluster."""
    place = KINDS[kind]
    group, _, _ = place.api_version.rpartition("/")
    attributes = {"verb": verb, "group": group, "resource": place.plural, "subresource": subresource, "namespace": namespace or ""}
    return await is_allowed(cluster, "SelfSubjectAccessReview", None, {"resourceAttributes": attributes})


async def is_allowed(cluster: Cluster, review: str, namespace: str | None, spec: Object) -> bool:
    """Return the API server's answer to a review of access, which is a kind."""
    metadata = {"metadata": {"namespace": namespace}} if namespace else {}
    answer = await cluster.request("POST", path_of(review, namespace), {**type_meta(review), **metadata, "spec": spec})
    return bool(answer.get("status", {}).get("allowed"))


async def forbidden(
    cluster: Cluster, verbs_of: dict[str, tuple[str, ...]], default: tuple[str, ...], objects: list[Object]
) -> list[Object]:
    """Those of `objects` that this person may not handle: `verbs_of` their kind, else `default`."""
    places = list(dict.fromkeys((item["kind"], item["metadata"].get("namespace")) for item in objects))
    asked = [(verb, *place) for place in places for verb in verbs_of.get(place[0], default)]
    answers = await asyncio.gather(*(may(cluster, *one) for one in asked))
    refused = {(kind, space) for (_, kind, space), is_allowed in zip(asked, answers, strict=True) if not is_allowed}
    return [item for item in objects if (item["kind"], item["metadata"].get("namespace")) in refused]
