"""One look at a cluster with one person's rights. Reads only; what is forbidden is said to be, and never an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster
from lockstep.kube.kinds import KINDS, path_of
from lockstep.plan.cluster.facts import ClusterFacts, Listing, Sight

OF_THE_CLUSTER = ("Node", "StorageClass", "PersistentVolume", "SecurityContextConstraints", "SriovNetworkNodePolicy")
OF_THE_NAMESPACE = ("PersistentVolumeClaim", "NetworkAttachmentDefinition", "ResourceQuota", "LimitRange")
POD_SECURITY = "pod-security.kubernetes.io/enforce"


async def read_facts(cluster: Cluster, namespace: str, namespace_from: str = "", elsewhere: frozenset[str] = frozenset()) -> ClusterFacts:
    """`elsewhere`: other namespaces whose networks count. Raises ApiError for anything but a lack of rights, and OSError."""
    version = str((await cluster.request("GET", "/version")).get("gitVersion", ""))
    groups = frozenset(str(group["name"]) for group in (await cluster.request("GET", "/apis")).get("groups", []))
    lists = {kind: await _listed(cluster, kind, None, groups) for kind in OF_THE_CLUSTER}
    lists |= {kind: await _listed(cluster, kind, namespace, groups) for kind in OF_THE_NAMESPACE}
    networks = lists["NetworkAttachmentDefinition"]
    for other in sorted(elsewhere - {namespace}):
        more = await _listed(cluster, "NetworkAttachmentDefinition", other, groups)
        networks = Listing(networks.kind, networks.items + more.items, networks.sight if more.seen else more.sight)
    there, labels = await _namespace(cluster, namespace)
    return ClusterFacts(
        server=cluster.server,
        version=version,
        namespace=namespace,
        groups=groups,
        lists=lists | {"NetworkAttachmentDefinition": networks},
        namespace_from=namespace_from,
        namespace_there=there,
        pod_security=labels.get(POD_SECURITY, ""),
    )


async def _listed(cluster: Cluster, kind: str, namespace: str | None, groups: frozenset[str]) -> Listing:
    group = KINDS[kind].api_version.rpartition("/")[0]
    if group and group not in groups:
        return Listing(kind, sight=Sight.NO_SUCH_KIND)  # an unknown kind is answered with 403 to whoever may list nothing
    try:
        return Listing(kind, tuple((await cluster.list(kind, namespace))["items"]))
    except ApiError as error:
        if error.status == NOT_FOUND:
            return Listing(kind, sight=Sight.NO_SUCH_KIND)
        if error.status == FORBIDDEN:
            return Listing(kind, sight=Sight.FORBIDDEN)
        raise


async def _namespace(cluster: Cluster, name: str) -> tuple[bool | None, Mapping[str, str]]:
    try:
        found = await cluster.get("Namespace", None, name)
    except ApiError as error:
        if error.status == FORBIDDEN:
            return None, {}
        raise
    return found is not None, {} if found is None else found["metadata"].get("labels") or {}


async def may_use_sccs(cluster: Cluster, facts: ClusterFacts, account: str) -> Mapping[str, bool] | None:
    """Whether the service account may use each SCC that was seen. None: not for this person to ask."""
    user = f"system:serviceaccount:{facts.namespace}:{account}"
    found = {}
    for item in facts.list("SecurityContextConstraints").items:
        name = str(item["metadata"]["name"])
        try:
            found[name] = await _may_use(cluster, facts.namespace, user, name)
        except ApiError as error:
            if error.status == FORBIDDEN:
                return None
            raise
    return found or None


async def _may_use(cluster: Cluster, namespace: str, user: str, scc: str) -> bool:
    asked: Object = {
        "namespace": namespace,
        "verb": "use",
        "group": "security.openshift.io",
        "resource": "securitycontextconstraints",
        "name": scc,
    }
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    body: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "LocalSubjectAccessReview",
        "metadata": {"namespace": namespace},
        "spec": {"user": user, "groups": groups, "resourceAttributes": asked},
    }
    answer = await cluster.request("POST", path_of("LocalSubjectAccessReview", namespace), body)
    return bool(answer.get("status", {}).get("allowed"))
