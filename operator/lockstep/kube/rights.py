"""Rights of the person behind a connection. The API server is asked; nothing is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from lockstep.api.objects import Object
from lockstep.kube.cluster import Cluster
from lockstep.kube.kinds import KINDS, path_of


async def may(cluster: Cluster, verb: str, kind: str, namespace: str | None = None, subresource: str = "") -> bool:
    """Return True if this verb is allowed on every object of the kind in the namespace; without one, in the whole cluster."""
    place = KINDS[kind]
    group, _, _ = place.api_version.rpartition("/")
    attributes = {"verb": verb, "group": group, "resource": place.plural, "subresource": subresource, "namespace": namespace or ""}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": attributes}}
    answer = await cluster.request("POST", path_of("SelfSubjectAccessReview"), review)
    return bool(answer.get("status", {}).get("allowed"))


async def may_all(cluster: Cluster, verbs: Iterable[str], kind: str, namespace: str | None = None) -> bool:
    return all(await asyncio.gather(*(may(cluster, verb, kind, namespace) for verb in verbs)))


async def forbidden(
    cluster: Cluster, verbs_of: dict[str, tuple[str, ...]], default: tuple[str, ...], objects: list[Object]
) -> list[Object]:
    """Those of `objects` that this person may not handle: `verbs_of` their kind, else `default`."""
    places = list(dict.fromkeys((item["kind"], item["metadata"].get("namespace")) for item in objects))
    answers = await asyncio.gather(*(may_all(cluster, verbs_of.get(kind, default), kind, space) for kind, space in places))
    allowed = dict(zip(places, answers, strict=True))
    return [item for item in objects if not allowed[item["kind"], item["metadata"].get("namespace")]]
