"""What one person may see of a cluster. Reads only; what is forbidden is None, and never an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.api.clusterfile import ClusterFile
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.profile import ClusterProfileSpec
from lockstep.plan.doctorseen import DNS_SERVICES, RIGHTS, Seen
from lockstep.platforms.kubernetes.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster, Object
from lockstep.platforms.kubernetes.kinds import path_of


async def survey(cluster: Cluster, found: ClusterFile, namespace: str) -> Seen:
    """Raises ApiError for anything but a lack of rights, and OSError when the cluster can't be reached."""
    crds = await _listed(cluster, "CustomResourceDefinition")
    deployment, may_see = await operator_deployment(cluster)
    rails = await survey_rails(cluster, found.profile.spec, namespace)
    return replace(
        rails,
        rights={what: await _may(cluster, namespace, *asked) for what, asked in RIGHTS.items()},
        crds=None if crds is None else {item["metadata"]["name"]: item for item in crds},
        deployment=deployment,
        may_see_operator=may_see,
        profile=await _got(cluster, "ClusterProfile", None, found.profile.metadata.name),
        nodes=await _listed(cluster, "Node"),
        classes=await _listed(cluster, "StorageClass"),
        claims=await _listed(cluster, "PersistentVolumeClaim", namespace),
        account=await _got(cluster, "ServiceAccount", namespace, found.profile.spec.security.service_account),
        dns=await _ready_dns(cluster),
    )


async def survey_rails(cluster: Cluster, spec: ClusterProfileSpec, namespace: str) -> Seen:
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


async def _got(cluster: Cluster, kind: str, namespace: str | None, name: str) -> Object | None:
    try:
        return await cluster.get(kind, namespace, name)
    except ApiError as error:
        if error.status == FORBIDDEN:
            return None
        raise


async def deployed_mode_and_image(cluster: Cluster, profile: str) -> tuple[str | None, str | None]:
    """`network.mode` of the ClusterProfile that is there, and the image of the operator; None: not there, or not to be seen."""
    found = await _got(cluster, "ClusterProfile", None, profile) or {}
    deployment, _ = await operator_deployment(cluster)
    image = None if deployment is None else str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])
    return found.get("spec", {}).get("network", {}).get("mode"), image


async def operator_deployment(cluster: Cluster) -> tuple[Object | None, bool]:
    """The operator's Deployment, and whether this person may look."""
    try:
        return await cluster.get("Deployment", OPERATOR_NAMESPACE, OPERATOR_NAME), True
    except ApiError as error:
        if error.status == FORBIDDEN:
            return None, False
        raise
