"""All that `lockstep plan` asks of a cluster, with the rights of whoever asks. Nothing is changed: every write is a dry run or a question.

What is refused for a lack of rights is None in what comes back; only a cluster that can't be reached is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.api import names
from lockstep.api.cluster import Platform
from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster
from lockstep.kube.kinds import path_of
from lockstep.plan.ahead.admission import REVIEW
from lockstep.plan.ahead.references import references
from lockstep.plan.checks.doctor import differing_keys
from lockstep.plan.cluster.lookahead import Around, Try
from lockstep.plan.render.resolve import Resolved
from lockstep.platforms.clusters.survey import operator_image, profile_if_seen

UNAUTHORIZED = 401
PROFILE = "TrainingCluster"
LIVE = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}


async def objects_of(cluster: Cluster, job: str, namespace: str) -> list[Object]:
    """The job, and whatever of its names is there. Secrets are not read: their values are nobody's to compare."""
    wanted = [("TrainingJob", job), ("StatefulSet", job), ("Service", names.service_name(job)), ("NetworkPolicy", job)]
    found = [await cluster.get(kind, namespace, name) for kind, name in wanted]
    for kind in ("ConfigMap", "PersistentVolumeClaim"):
        found += (await cluster.list(kind, namespace, {"labelSelector": f"{names.LABEL_MANAGED_BY}={names.APP}"}))["items"]
    return [item for item in found if item is not None]


async def observed(cluster: Cluster, job: str, namespace: str) -> list[Object] | None:
    """None: one of them may not be read."""
    try:
        return await objects_of(cluster, job, namespace)
    except ApiError as error:
        if error.status == FORBIDDEN:
            return None
        raise


async def look_around(cluster: Cluster, resolved: Resolved, samples: Sequence[Object], new: frozenset[str] | None) -> Around:
    """`samples`: the job, one pod and the StatefulSet, as they are tried out."""
    namespace = resolved.namespace
    own = {"labelSelector": f"{names.LABEL_JOB}={resolved.name}", **LIVE}
    networks = await _list(cluster, "NetworkAttachmentDefinition", namespace)
    profile, known = await _profile(cluster, resolved)
    present = {(found.kind, found.name): await _exists(cluster, found.kind, namespace, found.name) for found in references(resolved)}
    tries = {item["kind"]: await _try(cluster, item, apply=item["kind"] == "TrainingJob") for item in samples}
    if resolved.profile.spec.platform is Platform.OPENSHIFT:
        tries[REVIEW] = await _review(cluster, resolved, next(item for item in samples if item["kind"] == "Pod"))
    return Around(
        namespace=namespace,
        namespace_labels=await _labels(cluster, namespace),
        nodes=await _list(cluster, "Node", None),
        pods=await _list(cluster, "Pod", None, LIVE),
        own_pods=await _list(cluster, "Pod", namespace, own),
        quotas=await _list(cluster, "ResourceQuota", namespace),
        ranges=await _list(cluster, "LimitRange", namespace),
        claims=await _list(cluster, "PersistentVolumeClaim", namespace),
        classes=await _list(cluster, "StorageClass", None),
        networks=None if networks is None else frozenset(str(item["metadata"]["name"]) for item in networks),
        present=present | {(PROFILE, resolved.profile.metadata.name): known},
        operator_image=(await operator_image(cluster, namespace))[0],
        profile_differs=() if profile is None else tuple(differing_keys(resolved.profile.spec, profile)),
        tries=tries,
        new=new,
    )


async def nodes_of(cluster: Cluster) -> tuple[Object, ...] | None:
    """None: the account may not list them."""
    return await _list(cluster, "Node", None)


async def room_around(cluster: Cluster, namespace: str, job: str) -> Around:
    """Nodes and what runs on them, and nothing else; what `job` has itself counts as free."""
    own = {"labelSelector": f"{names.LABEL_JOB}={job}", **LIVE}
    return Around(
        namespace=namespace,
        nodes=await nodes_of(cluster),
        pods=await _list(cluster, "Pod", None, LIVE),
        own_pods=await _list(cluster, "Pod", namespace, own),
    )


async def _list(cluster: Cluster, kind: str, namespace: str | None, query: dict[str, str] | None = None) -> tuple[Object, ...] | None:
    try:
        return tuple((await cluster.list(kind, namespace, query))["items"])
    except ApiError as error:
        if error.status in (FORBIDDEN, NOT_FOUND):
            return None
        raise


async def _exists(cluster: Cluster, kind: str, namespace: str, name: str) -> bool | None:
    try:
        return await cluster.exists(kind, namespace, name)
    except ApiError as error:
        if error.status == FORBIDDEN:
            return None
        raise


async def _labels(cluster: Cluster, namespace: str) -> dict[str, str] | None:
    try:
        found = await cluster.get("Namespace", None, namespace)
    except ApiError as error:
        if error.status == FORBIDDEN:
            return None
        raise
    return None if found is None else dict(found["metadata"].get("labels") or {})


async def _profile(cluster: Cluster, resolved: Resolved) -> tuple[Object | None, bool | None]:
    """The TrainingCluster of the namespace's own operator, else the cluster's, and whether it is there."""
    there, may_see = await profile_if_seen(cluster, resolved.profile.metadata.name, resolved.namespace)
    return there, there is not None if may_see else None


async def _try(cluster: Cluster, item: Object, *, apply: bool) -> Try:
    try:
        return Try(True, warnings=tuple(await cluster.try_out(item, apply=apply)))
    except ApiError as error:
        return refused(item["kind"], error)


def refused(kind: str, error: ApiError) -> Try:
    """A lack of rights is no refusal of the object: both come as 403, told apart by the words that the authorizer always uses."""
    if error.status == FORBIDDEN and " cannot " in error.message and " resource " in error.message:
        return Try(None, f"your account may not {'patch' if kind == 'TrainingJob' else 'create'} one: {error.message}")
    if error.status == NOT_FOUND and "could not find the requested resource" in error.message:
        return Try(None, f"the cluster knows no {kind}: lockstep deploy installs it; lockstep run --in-namespace does without")
    return Try(False, error.message)


async def _review(cluster: Cluster, resolved: Resolved, pod: Object) -> Try:
    """Which SCC the pods would get from their service account: the asker's own SCCs, which a dry run counts, too, would not help them."""
    account = resolved.profile.spec.security.service_account
    template: dict[str, Any] = {
        "metadata": {key: value for key, value in pod["metadata"].items() if key in ("labels", "annotations")},
        "spec": pod["spec"],
    }
    body = {
        "apiVersion": "security.openshift.io/v1", "kind": REVIEW, "spec": {"template": template, "serviceAccountNames": [account]},
    }  # fmt: skip
    try:
        answer = await cluster.request("POST", path_of(REVIEW, resolved.namespace), body)
    except ApiError as error:
        if error.status in (FORBIDDEN, NOT_FOUND):
            why = (
                "your account may not ask" if error.status == FORBIDDEN else "the cluster knows no SCCs; is it OpenShift, as its file says?"
            )
            return Try(None, why)
        return Try(False, f": {error.message}")
    allowed = (answer.get("status") or {}).get("allowedServiceAccounts") or []
    by = next((found.get("allowedBy") for found in allowed if found.get("name") == account), None)
    reason = next((found.get("reason") for found in allowed if found.get("name") == account), None)
    return Try(by is not None, f" (SCC {by['name']})" if by is not None else f": {reason}" if reason else "")
