"""What one person may see of a cluster. Reads only; what is forbidden is None, and never an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.api.names import API_VERSION, OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster
from lockstep.kube.kinds import path_of
from lockstep.plan.cluster.scope import NAMED_BINDING, PROFILE_CONFIG, PROFILE_KEY, Scope, image_of, scope_of, why_unserved
from lockstep.plan.cluster.seen import DNS_SERVICES, RIGHTS, Seen

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster, TrainingClusterSpec
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.job import TrainingJob


async def survey(cluster: Cluster, found: ClusterFile, namespace: str) -> Seen:
    """Raises ApiError for anything but a lack of rights, and OSError when the cluster can't be reached."""
    name, account = found.profile.metadata.name, found.profile.spec.security.service_account
    places, objects, lists, rights = await asyncio.gather(
        asyncio.gather(
            survey_rails(cluster, found.profile.spec, namespace), operator_deployment(cluster, namespace), unserved(cluster, namespace)
        ),
        asyncio.gather(profile_if_seen(cluster, name, namespace), _if_seen(cluster, "ServiceAccount", namespace, account)),
        asyncio.gather(_serves(cluster), _ready_dns(cluster), _all_listed(cluster, namespace)),
        asyncio.gather(*(_may(cluster, namespace, *asked) for asked in RIGHTS.values())),
    )
    (rails, (deployment, may_see), no_operator), (profile, own_account), (serves, dns, (crds, nodes, classes, claims)) = (
        places,
        objects,
        lists,
    )
    looked = {"TrainingCluster": profile, "ServiceAccount": own_account}
    return replace(
        rails,
        rights=dict(zip(RIGHTS, rights, strict=True)),
        crds=None if crds is None else {item["metadata"]["name"]: item for item in crds},
        deployment=deployment,
        may_see_operator=may_see,
        operator_stuck="" if deployment is None else await _what_stops(cluster, deployment),
        unserved="" if deployment is None else no_operator,
        serves=serves,
        profile=profile[0],
        nodes=nodes,
        classes=classes,
        claims=claims,
        account=own_account[0],
        hidden=frozenset(kind for kind, (_, may_see) in looked.items() if not may_see),
        dns=dns,
    )


async def _what_stops(cluster: Cluster, deployment: Object) -> str:
    """Why pods of the operator don't start; '' while nothing is seen."""
    from lockstep.platforms.clusters.install import BACKED_OFF, PULL_FAILED, stuck, unpulled_image

    home = str(deployment["metadata"].get("namespace", OPERATOR_NAMESPACE))
    return await unpulled_image(cluster, home, deployment, (*PULL_FAILED, BACKED_OFF)) or await stuck(cluster, home, deployment)


async def survey_rails(cluster: Cluster, spec: TrainingClusterSpec, namespace: str) -> Seen:
    """Only the networks of the namespace, and where those are that it lacks. Raises as `survey` does."""
    listed = await _listed(cluster, "NetworkAttachmentDefinition", namespace)
    if listed is None:
        return Seen(namespace=namespace)
    there = frozenset(str(item["metadata"]["name"]) for item in listed)
    lacking = {name for name in spec.network.rdma.networks if "/" not in name} - there
    everywhere = await _listed(cluster, "NetworkAttachmentDefinition") if lacking else None
    elsewhere = {str(m["name"]): str(m["namespace"]) for m in (item["metadata"] for item in everywhere or ()) if m["name"] in lacking}
    return Seen(namespace=namespace, networks=there, networks_elsewhere=elsewhere)


async def _ready_dns(cluster: Cluster) -> dict[str, int] | None:
    """Ready endpoints by namespace/name of the service. None: what is there may not be read."""
    found, hidden = {}, False
    for name in DNS_SERVICES:
        namespace, _, service = name.partition("/")
        slices = await _listed(cluster, "EndpointSlice", namespace, {"labelSelector": f"kubernetes.io/service-name={service}"})
        hidden = hidden or slices is None
        endpoints = [endpoint for part in slices or () for endpoint in part.get("endpoints") or []]
        if slices:
            found[name] = sum(endpoint.get("conditions", {}).get("ready") is not False for endpoint in endpoints)
    return None if hidden and not found else found


async def _may(cluster: Cluster, namespace: str, verb: str, group: str, resource: str, subresource: str) -> bool:
    asked = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "subresource": subresource}
    body: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    answer = await cluster.request("POST", path_of("SelfSubjectAccessReview"), body)
    return bool(answer.get("status", {}).get("allowed"))


async def _listed(
    cluster: Cluster, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None
) -> tuple[Object, ...] | None:
    """None: forbidden, or a kind that the cluster doesn't know."""
    try:
        return tuple((await cluster.list(kind, namespace, query))["items"])
    except ApiError as error:
        if error.status in (FORBIDDEN, NOT_FOUND):
            return None
        raise


async def _all_listed(cluster: Cluster, namespace: str) -> tuple[tuple[Object, ...] | None, ...]:
    """CustomResourceDefinitions, Nodes, StorageClasses and the namespace's claims, each as `_listed` has it."""
    kinds = {"CustomResourceDefinition": None, "Node": None, "StorageClass": None, "PersistentVolumeClaim": namespace}
    return tuple(await asyncio.gather(*(_listed(cluster, kind, place) for kind, place in kinds.items())))


async def _serves(cluster: Cluster) -> bool | None:
    try:
        await cluster.request("GET", f"/apis/{API_VERSION}")
    except ApiError as error:
        if error.status not in (NOT_FOUND, FORBIDDEN):
            raise
        return None if error.status == FORBIDDEN else False
    return True


async def _got(cluster: Cluster, kind: str, namespace: str | None, name: str) -> Object | None:
    """None: not there, or not to be seen."""
    return (await _if_seen(cluster, kind, namespace, name))[0]


async def _if_seen(cluster: Cluster, kind: str, namespace: str | None, name: str) -> tuple[Object | None, bool]:
    """The object, and whether this person may look."""
    try:
        return await cluster.get(kind, namespace, name), True
    except ApiError as error:
        if error.status == FORBIDDEN:
            return None, False
        raise


async def as_deployed(cluster: Cluster, profile: str, namespace: str) -> tuple[str | None, str | None, Scope]:
    """`network.mode` of the cluster that is there, the image of the operator and where it works; None: not there, or not to be seen."""
    deployment, _ = await operator_deployment(cluster, namespace)
    there = await profile_there(cluster, profile, namespace) or {}
    mode = there.get("spec", {}).get("network", {}).get("mode")
    if deployment is None:
        return mode, None, Scope()
    return mode, image_of(deployment), scope_of(deployment)


async def operator_deployment(cluster: Cluster, namespace: str | None = None) -> tuple[Object | None, bool]:
    """The operator's Deployment, and whether this person may look. `namespace`: one of its own there comes first."""
    places = dict.fromkeys(place for place in (namespace, OPERATOR_NAMESPACE) if place)
    seen = await asyncio.gather(*(_if_seen(cluster, "Deployment", place, OPERATOR_NAME) for place in places))
    deployment = next((one for one, _ in seen if one is not None), None)
    return deployment, deployment is not None or all(may_see for _, may_see in seen)


async def operator_image(cluster: Cluster, namespace: str) -> tuple[str | None, bool]:
    """The image of the operator that works in the namespace, and whether this person may look. None: there is none, or it can't be seen."""
    deployment, may_see = await operator_deployment(cluster, namespace)
    return (None if deployment is None else image_of(deployment)), may_see


async def with_image(cluster: Cluster, job: TrainingJob, profile: TrainingCluster, namespace: str) -> TrainingCluster:
    """The TrainingCluster with the image that the operator there would take, as far as it can be seen, where neither it nor the job names one."""
    if job.spec.image or profile.spec.image:
        return profile
    from lockstep.plan.render.resolve import trainer_image

    image, _ = await operator_image(cluster, namespace)
    spec = profile.spec.model_copy(update={"image": None if image is None else trainer_image(image)})
    return profile.model_copy(update={"spec": spec})


async def unserved(cluster: Cluster, namespace: str) -> str:
    """Why no operator works in this namespace; "" where one does, as far as this person may see. Raises as `survey` does."""
    (deployment, may_see), (binding, may_see_binding), account = await asyncio.gather(
        operator_deployment(cluster, namespace),
        _if_seen(cluster, "RoleBinding", namespace, NAMED_BINDING),
        _got(cluster, "ServiceAccount", namespace, OPERATOR_NAME),
    )
    if not may_see:
        return ""
    is_elsewhere = deployment is not None and deployment["metadata"]["namespace"] != namespace
    is_bound = binding is not None if may_see_binding else None
    is_left_alone = is_elsewhere and account is not None
    return why_unserved(namespace, deployment, is_bound=is_bound, is_left_alone=is_left_alone)


async def profile_there(cluster: Cluster, name: str, namespace: str) -> Object | None:
    """The cluster of the namespace's own operator, else the TrainingCluster. None: not there, or not to be seen."""
    return (await profile_if_seen(cluster, name, namespace))[0]


async def profile_if_seen(cluster: Cluster, name: str, namespace: str) -> tuple[Object | None, bool]:
    """The same, and whether this person may look at both places where it may be."""
    config, may_see_own = await _if_seen(cluster, "ConfigMap", namespace, PROFILE_CONFIG)
    if config is not None and PROFILE_KEY in (config.get("data") or {}):
        profile: Object = json.loads(config["data"][PROFILE_KEY])
        if profile["metadata"]["name"] == name:
            return profile, True
    there, may_see = await _if_seen(cluster, "TrainingCluster", None, name)
    return there, there is not None or (may_see and may_see_own)
