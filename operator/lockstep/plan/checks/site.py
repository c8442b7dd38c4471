"""What jobs need of a cluster besides Lockstep: names, nodes, storage, rails (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lockstep.api.cluster import Platform, TrainingClusterSpec
from lockstep.api.names import LABEL_HOSTNAME
from lockstep.api.objects import Object, is_true
from lockstep.plan.cluster.railnetworks import copy_command, is_out_of_reach, moved_here, out_of_reach
from lockstep.plan.cluster.seen import DNS_SERVICES, Finding, Seen, Verdict
from lockstep.plan.render.fabric import GPU_RESOURCE, rail_resources
from lockstep.plan.render.scheduling import usual_tolerations
from lockstep.plan.waiting.nodes import allocatable
from lockstep.plan.waiting.taints import lasting_taints, shown_taint
from lockstep_spec.choices import StorageMode
from lockstep_spec.words import named

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
ROLE = "node-role.kubernetes.io/"
NAMED = 3
"""Nodes named in one sentence."""


def site(seen: Seen, spec: TrainingClusterSpec) -> Iterator[Finding]:
    """Every finding, in the order in which they should be mended."""
    yield _dns(seen)
    yield from _nodes(seen, spec)
    yield from _storage(seen, spec)
    yield from fabric(seen, spec)


def _dns(seen: Seen) -> Finding:
    """Pods of a job find each other by name."""
    if seen.dns is None:
        return Finding("DNS", Verdict.UNKNOWN, f"you may not look at the endpoints of {' or '.join(DNS_SERVICES)}")
    if not seen.dns:
        return Finding(
            "DNS",
            Verdict.UNKNOWN,
            f"there is neither {' nor '.join(DNS_SERVICES)}: preflight's check names shows whether pods find each other",
        )
    name, ready = max(seen.dns.items(), key=lambda found: found[1])
    if ready:
        return Finding("DNS", Verdict.OK, f"{name} has {ready} ready endpoint{'s' if ready > 1 else ''}")
    return Finding(
        "DNS",
        Verdict.FAILED,
        f"{name} has no ready endpoint: pods can't find each other by name",
        f"kubectl get pods -n {name.partition('/')[0]}",
    )


def usable_nodes(nodes: Iterable[Object], spec: TrainingClusterSpec) -> list[Object]:
    """Nodes that the cluster's names and labels allow, tainted ones too; control planes whose taint it doesn't tolerate only if named, or alone."""
    found = [node for node in nodes if _is_named(node, spec) and _has_labels(node, spec)]
    workers = [node for node in found if not any(taint["key"].startswith(ROLE) for taint in taints_of(node, spec))]
    return found if spec.nodes.gpu_nodes else workers or found


def taints_of(node: Object, spec: TrainingClusterSpec) -> list[Object]:
    """What keeps off pods that tolerate what the cluster says, and will tomorrow."""
    return lasting_taints(node, usual_tolerations(spec))


def taints_matter(spec: TrainingClusterSpec, good: int) -> bool:
    """Whether they are worth a word: of nodes that the cluster names, or where too few are left. Else such nodes are simply others'."""
    return bool(spec.nodes.gpu_nodes) or good < spec.gpus.default_nodes


def _is_named(node: Object, spec: TrainingClusterSpec) -> bool:
    return not spec.nodes.gpu_nodes or _host(node) in spec.nodes.gpu_nodes


def _has_labels(node: Object, spec: TrainingClusterSpec) -> bool:
    labels = node["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in spec.nodes.selector.items())


def _host(node: Object) -> str:
    return str(node["metadata"].get("labels", {}).get(LABEL_HOSTNAME, node["metadata"]["name"]))


def _nodes(seen: Seen, spec: TrainingClusterSpec) -> Iterator[Finding]:
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
    tainted = {_host(node): taints[0] for node in usable if _host(node) not in troubled and (taints := taints_of(node, spec))}
    good = len(usable) - len(troubled) - len(tainted)
    for host, why in troubled.items():
        yield Finding("nodes", Verdict.WARNING, f"node {host} {why}", f"kubectl describe node {host}")
    for host, taint in tainted.items() if taints_matter(spec, good) else ():
        said = f"node {host} has the taint {shown_taint(taint)}, which the cluster's pod.tolerations doesn't tolerate"
        yield Finding("nodes", Verdict.WARNING, said, "tolerate it there, if the node is meant for jobs")
    said = (
        f"{good} of {len(usable)} nodes that the cluster allows can take pods; a job has {spec.gpus.default_nodes} unless it says otherwise"
    )
    yield Finding("nodes", Verdict.OK if good >= spec.gpus.default_nodes else Verdict.FAILED, said)


def _trouble(node: Object, spec: TrainingClusterSpec) -> str:
    status = node.get("status", {})
    if not is_true(status, "Ready"):
        return "is not Ready"
    if node["spec"].get("unschedulable"):
        return "is cordoned"
    gpus = allocatable(node, GPU_RESOURCE)
    return f"has {gpus} of {spec.gpus.per_node} GPUs" if gpus < spec.gpus.per_node else ""


def _storage(seen: Seen, spec: TrainingClusterSpec) -> Iterator[Finding]:
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


def _claims(seen: Seen, spec: TrainingClusterSpec) -> Iterator[Finding]:
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


def fabric(seen: Seen, spec: TrainingClusterSpec) -> Iterator[Finding]:
    """What puts the NICs into pods of `seen.namespace`."""
    if not spec.network.rdma.enabled:
        yield Finding("fabric", Verdict.OK, "TCP: the cluster has no RDMA")
        return
    if not spec.network.rdma.rails:
        fix = "name each NIC's network, resource or both in network.rdma.rails (docs/how-to/describe-a-cluster.md)"
        yield Finding("fabric", Verdict.WARNING, "RDMA without rails: nothing puts an RDMA NIC into the pods", fix)
    for network in dict.fromkeys(spec.network.rdma.networks):
        yield from _network(seen, network, spec.platform)
    for resource, count in rail_resources(spec.network.rdma).items():
        yield from _resource(seen, spec, resource, int(count))


def _network(seen: Seen, network: str, platform: Platform) -> Iterator[Finding]:
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
            _copied(name, seen.networks_elsewhere.get(name), seen.namespace),
        )
    if is_out_of_reach(network, seen.namespace, platform):
        yield Finding("fabric", Verdict.WARNING, out_of_reach(network, seen.namespace), moved_here(network, seen.namespace))


def _resource(seen: Seen, spec: TrainingClusterSpec, resource: str, count: int) -> Iterator[Finding]:
    """`count`: how many of it a pod asks for."""
    if seen.nodes is None:
        return
    without = [_host(node) for node in usable_nodes(seen.nodes, spec) if allocatable(node, resource) < count]
    if without:
        what = f"no {resource}" if count == 1 else f"fewer than {count} of {resource}"
        said = f"{_listed(without)} {'has' if len(without) == 1 else 'have'} {what}"
        yield Finding("fabric", Verdict.WARNING, said, "is the device plugin running there?")
    else:
        yield Finding("fabric", Verdict.OK, f"every node has {resource if count == 1 else f'{count} of {resource}'}")


def _copied(network: str, elsewhere: str | None, namespace: str) -> str:
    return "an administrator makes its NetworkAttachmentDefinition" if elsewhere is None else copy_command(network, elsewhere, namespace)


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _listed(names: list[str]) -> str:
    return named("node", names, NAMED)
