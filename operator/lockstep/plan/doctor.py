"""Is this cluster ready for jobs? From what one person may see of it: what is right, what is wrong, and how to mend it (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lockstep.api.clusterfile import ClusterFile
from lockstep.api.names import LABEL_HOSTNAME, OPERATOR_NAMESPACE
from lockstep.api.profile import ClusterProfileSpec
from lockstep.api.shared import StorageMode
from lockstep.plan.fabric import GPU_RESOURCE
from lockstep.plan.nodes import allocatable
from lockstep.plan.readstatus import is_true

Object = dict[str, Any]
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
NAMED = 3
"""Nodes named in one sentence."""


class Verdict(StrEnum):
    """What came of one check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"  # not for this person to see


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    subject: str
    verdict: Verdict
    said: str
    fix: str = ""
    """What to do, as a sentence or a command."""


@dataclass(frozen=True)
class Seen:
    """A cluster as one person sees it. None: that person may not read it."""

    namespace: str
    rights: Mapping[str, bool] = field(default_factory=dict)
    """What the person may do, in the words of RIGHTS."""
    crds: Mapping[str, Object] | None = None
    """By name."""
    deployment: Object | None = None
    may_see_operator: bool = True
    profile: Object | None = None
    nodes: tuple[Object, ...] | None = None
    classes: tuple[Object, ...] | None = None
    claims: tuple[Object, ...] | None = None
    account: Object | None = None
    networks: frozenset[str] | None = None
    """NetworkAttachmentDefinitions of the namespace; None also where the cluster knows no such kind."""


RIGHTS = {
    "create TrainingJobs": ("create", "lockstep.dev", "trainingjobs", ""),
    "read logs of pods": ("get", "", "pods", "log"),
    "run programs in pods": ("create", "", "pods", "exec"),
    "create pods": ("create", "", "pods", ""),
    "create claims": ("create", "", "persistentvolumeclaims", ""),
}
"""What a user of the namespace needs: verb, API group, resource, subresource."""


def examine(found: ClusterFile, seen: Seen, crds: Mapping[str, Object]) -> Iterator[Finding]:
    """Every finding, in the order in which they should be mended. `crds`: those of this version, by name."""
    yield from _rights(seen)
    yield from _definitions(seen, crds, found.cluster.name)
    yield _operator(seen, found.cluster.name)
    yield _profile(seen, found)
    yield _account(seen, found)
    yield from _nodes(seen, found.profile.spec)
    yield from _storage(seen, found.profile.spec)
    yield from _fabric(seen, found.profile.spec)


def _rights(seen: Seen) -> Iterator[Finding]:
    lacking = [what for what, allowed in seen.rights.items() if not allowed]
    where = f"in namespace {seen.namespace}"
    if lacking:
        fix = f"an administrator: kubectl create rolebinding USER-edit --clusterrole=edit --user=USER -n {seen.namespace}"
        yield Finding("rights", Verdict.FAILED, f"you may not {', '.join(lacking)} {where}", fix)
    elif seen.rights:
        yield Finding("rights", Verdict.OK, f"you may {', '.join(seen.rights)} {where}")


def _definitions(seen: Seen, wanted: Mapping[str, Object], cluster: str) -> Iterator[Finding]:
    deploy = f"lockstep deploy {cluster} (needs the rights of an administrator)"
    if seen.crds is None:
        yield Finding("CRDs", Verdict.UNKNOWN, "you may not read CustomResourceDefinitions")
        return
    absent = [name for name in wanted if name not in seen.crds]
    older = [name for name, crd in wanted.items() if name in seen.crds and _schema(seen.crds[name]) != _schema(crd)]
    if absent:
        yield Finding("CRDs", Verdict.FAILED, f"{', '.join(absent)} not installed", deploy)
    elif older:
        yield Finding("CRDs", Verdict.WARNING, f"{', '.join(older)} of another version than this lockstep's", deploy)
    else:
        yield Finding("CRDs", Verdict.OK, f"{len(wanted)} installed, of this version")


def _schema(crd: Object) -> object:
    """What is compared: the fields' names, since the API server fills in defaults of its own."""
    return [_fields(version.get("schema", {}).get("openAPIV3Schema", {})) for version in crd["spec"]["versions"]]


def _fields(schema: Object) -> object:
    inner = {name: _fields(value) for name, value in schema.get("properties", {}).items()}
    items = schema.get("items")
    return inner or (_fields(items) if isinstance(items, dict) else schema.get("type"))


def _operator(seen: Seen, cluster: str) -> Finding:
    if not seen.may_see_operator:
        return Finding("operator", Verdict.UNKNOWN, f"you may not look into namespace {OPERATOR_NAMESPACE}")
    if seen.deployment is None:
        return Finding(
            "operator", Verdict.FAILED, "not installed", f"lockstep deploy {cluster}; or without one: lockstep run --in-namespace"
        )
    ready, wanted = seen.deployment.get("status", {}).get("readyReplicas", 0), seen.deployment["spec"].get("replicas", 1)
    if not ready:
        logs = f"kubectl logs -n {OPERATOR_NAMESPACE} deploy/{seen.deployment['metadata']['name']}"
        return Finding("operator", Verdict.FAILED, f"0 of {wanted} replicas ready", logs)
    verdict = Verdict.OK if ready >= wanted else Verdict.WARNING
    return Finding(
        "operator", verdict, f"{ready} of {wanted} replicas ready", "" if ready >= wanted else f"kubectl get pods -n {OPERATOR_NAMESPACE}"
    )


def _profile(seen: Seen, found: ClusterFile) -> Finding:
    name = found.profile.metadata.name
    deploy = f"lockstep deploy {found.cluster.name}"
    if seen.profile is None:
        return Finding("profile", Verdict.FAILED, f"ClusterProfile {name} is not on the cluster", deploy)
    differs = differing_keys(found.profile.spec, seen.profile)
    if differs:
        return Finding("profile", Verdict.WARNING, f"{name} differs from its file in {', '.join(differs)}", f"{deploy}, or lockstep diff")
    return Finding("profile", Verdict.OK, f"{name} is as its file says")


def differing_keys(spec: ClusterProfileSpec, there: Object) -> list[str]:
    """Sections in which the ClusterProfile on the cluster is not as the file has it."""
    stated = spec.to_dict()
    stated.get("network", {}).pop("mode", None)  # MODE= of the deployment, not the file's
    return sorted(key for key, value in stated.items() if _without_mode(key, there["spec"].get(key)) != value)


def _without_mode(key: str, value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "mode"} if key == "network" and isinstance(value, dict) else value


def _account(seen: Seen, found: ClusterFile) -> Finding:
    name = found.profile.spec.security.service_account
    if seen.account is None:
        fix = f"kubectl create serviceaccount {name} -n {seen.namespace}"
        return Finding("service account", Verdict.FAILED, f"{name} is not in namespace {seen.namespace}", fix)
    return Finding("service account", Verdict.OK, f"{name} is there")


def usable_nodes(nodes: Iterable[Object], spec: ClusterProfileSpec) -> list[Object]:
    """Nodes that the profile's names and labels allow."""
    return [node for node in nodes if _is_named(node, spec) and _has_labels(node, spec)]


def _is_named(node: Object, spec: ClusterProfileSpec) -> bool:
    return not spec.nodes.gpu_nodes or _host(node) in spec.nodes.gpu_nodes


def _has_labels(node: Object, spec: ClusterProfileSpec) -> bool:
    labels = node["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in spec.nodes.selector.items())


def _host(node: Object) -> str:
    return str(node["metadata"].get("labels", {}).get(LABEL_HOSTNAME, node["metadata"]["name"]))


def _nodes(seen: Seen, spec: ClusterProfileSpec) -> Iterator[Finding]:
    if seen.nodes is None:
        yield Finding("nodes", Verdict.UNKNOWN, "you may not list nodes")
        return
    absent = sorted(set(spec.nodes.gpu_nodes) - {_host(node) for node in seen.nodes})
    if absent:
        yield Finding(
            "nodes", Verdict.WARNING, f"{_listed(absent)} of nodes.gpu_nodes {_are(absent)} not in the cluster", "edit the cluster file"
        )
    usable = usable_nodes(seen.nodes, spec)
    troubled = {_host(node): why for node in usable if (why := _trouble(node, spec))}
    for host, why in troubled.items():
        yield Finding("nodes", Verdict.WARNING, f"node {host} {why}", f"kubectl describe node {host}")
    good = len(usable) - len(troubled)
    said = (
        f"{good} of {len(usable)} nodes that the profile allows can take pods; a job has {spec.gpus.default_nodes} unless it says otherwise"
    )
    yield Finding("nodes", Verdict.OK if good >= spec.gpus.default_nodes else Verdict.FAILED, said)


def _trouble(node: Object, spec: ClusterProfileSpec) -> str:
    status = node.get("status", {})
    if not is_true(status, "Ready"):
        return "is not Ready"
    if node["spec"].get("unschedulable"):
        return "is cordoned"
    gpus = allocatable(node, GPU_RESOURCE)
    return f"has {gpus} of {spec.gpus.per_node} GPUs" if gpus < spec.gpus.per_node else ""


def _storage(seen: Seen, spec: ClusterProfileSpec) -> Iterator[Finding]:
    shared = spec.storage.mode is StorageMode.SHARED
    name = spec.storage.class_rwx if shared else spec.storage.class_rwo
    if seen.classes is None:
        yield Finding("storage", Verdict.UNKNOWN, "you may not list storage classes")
    else:
        yield _class(seen.classes, name, "storage.class_rwx" if shared else "storage.class_rwo")
    if shared:
        yield from _claims(seen, spec)


def _class(classes: tuple[Object, ...], name: str | None, key: str) -> Finding:
    known = [str(found["metadata"]["name"]) for found in classes]
    if name is not None:
        if name in known:
            return Finding("storage", Verdict.OK, f"class {name} is there")
        return Finding(
            "storage", Verdict.FAILED, f"{key} is {name}; the cluster has {', '.join(known) or 'no class at all'}", "edit the cluster file"
        )
    default = [found["metadata"]["name"] for found in classes if found["metadata"].get("annotations", {}).get(DEFAULT_CLASS) == "true"]
    if default:
        return Finding("storage", Verdict.OK, f"{key} is not set: claims get the default class {default[0]}")
    return Finding(
        "storage", Verdict.FAILED, f"{key} is not set and the cluster has no default class", f"set it to one of {', '.join(known)}"
    )


def _claims(seen: Seen, spec: ClusterProfileSpec) -> Iterator[Finding]:
    if seen.claims is None:
        yield Finding("claims", Verdict.UNKNOWN, f"you may not list claims in namespace {seen.namespace}")
        return
    there = {found["metadata"]["name"]: found for found in seen.claims}
    for name in (spec.storage.workspace_claim, spec.storage.datasets_claim):
        yield _claim(name, there.get(name))


def _claim(name: str, claim: Object | None) -> Finding:
    if claim is None:
        return Finding("claims", Verdict.OK, f"{name} is not there yet: the first job makes it")
    phase, modes = claim.get("status", {}).get("phase", "Pending"), claim["spec"].get("accessModes", [])
    if "ReadWriteMany" not in modes:
        fix = "name another claim in the cluster file, or use storage.mode: volumeClaimTemplates"
        return Finding("claims", Verdict.FAILED, f"{name} is {', '.join(modes)}: pods of several nodes can't all mount it", fix)
    if phase == "Bound":
        return Finding("claims", Verdict.OK, f"{name} is bound, ReadWriteMany")
    return Finding("claims", Verdict.WARNING, f"{name} is {phase}", f"kubectl describe pvc {name}")


def _fabric(seen: Seen, spec: ClusterProfileSpec) -> Iterator[Finding]:
    if not spec.network.rdma.enabled:
        yield Finding("fabric", Verdict.OK, "TCP: the profile has no RDMA")
        return
    if not spec.network.rdma.rails:
        fix = "name each NIC's network and resource in network.rdma.rails (docs/how-to/describe-a-cluster.md)"
        yield Finding("fabric", Verdict.WARNING, "RDMA without rails: nothing puts an RDMA NIC into the pods", fix)
    for rail in spec.network.rdma.rails:
        yield from _rail(seen, spec, rail.network, rail.resource)


def _rail(seen: Seen, spec: ClusterProfileSpec, network: str, resource: str | None) -> Iterator[Finding]:
    namespace, _, name = network.rpartition("/")
    if seen.networks is None:
        yield Finding(
            "fabric",
            Verdict.UNKNOWN,
            f"whether network {network} exists: you may not list NetworkAttachmentDefinitions, or the cluster has none",
        )
    elif not namespace and name not in seen.networks:
        yield Finding(
            "fabric",
            Verdict.FAILED,
            f"network {name} is not in namespace {seen.namespace}",
            "an administrator makes its NetworkAttachmentDefinition",
        )
    if seen.nodes is None or resource is None:
        return
    without = [_host(node) for node in usable_nodes(seen.nodes, spec) if not allocatable(node, resource)]
    if without:
        yield Finding(
            "fabric",
            Verdict.WARNING,
            f"{_listed(without)} {'has' if len(without) == 1 else 'have'} no {resource}",
            "is the device plugin running there?",
        )
    else:
        yield Finding("fabric", Verdict.OK, f"every node has {resource}")


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"node{'s' if len(names) > 1 else ''} {', '.join(names[:NAMED])}{more}"
