"""Nodes, storage and rights against the cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.objects import Object
from lockstep.plan.checks.finding import Finding, failed, fine, unknown, warning
from lockstep.plan.checks.site import taints_matter, taints_of, usable_nodes
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.storageclasses import Shareable, judge_class
from lockstep.plan.discovery.nodes import PRODUCT, host, labels
from lockstep.plan.discovery.rights import allows_ipc_lock
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.waiting.nodes import allocatable, named
from lockstep.plan.waiting.taints import shown_taint
from lockstep_spec.choices import StorageMode

OWN_SCC = "an administrator: lockstep deploy brings one that allows nothing else"


def lint_namespace(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.namespace_there is False:
        yield failed("cluster.namespace", f"there is no namespace {facts.namespace}", f"kubectl create namespace {facts.namespace}")
    elif facts.namespace_there is None:
        yield unknown("cluster.namespace", f"whether namespace {facts.namespace} exists: you may not read it (403)")


def lint_nodes(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Names that don't exist, too few nodes or GPUs, nodes that differ."""
    seen = facts.list("Node")
    if not seen.seen:
        yield unknown("nodes.gpu_nodes", f"whether they exist, and what they have: {seen.why_not}")
        return
    absent = sorted(set(spec.nodes.gpu_nodes) - set(map(host, seen.items)))
    if absent:
        said = f"{named(absent)} {'is' if len(absent) == 1 else 'are'} not in the cluster"
        yield failed("nodes.gpu_nodes", said, "kubectl get nodes; then edit the list")
    usable = [node for node in usable_nodes(seen.items, spec) if allocatable(node, GPU_RESOURCE) >= spec.gpus.per_node]
    enough = [node for node in usable if not taints_of(node, spec)]
    if taints_matter(spec, len(enough)):
        yield from _tainted(usable, spec)
    if len(enough) < spec.gpus.default_nodes:
        has = (
            f"{len(enough)} of them {'has' if len(enough) == 1 else 'have'} {spec.gpus.per_node} GPUs"
            if spec.gpus.per_node
            else f"{len(enough)} are there"
        )
        has += " and no taint that keeps jobs off" if len(enough) < len(usable) else ""
        said = f"a job has {spec.gpus.default_nodes} nodes unless it says otherwise; of those that the cluster allows, {has}"
        yield failed("gpus.default_nodes", said, "fewer nodes, fewer gpus.per_node, or more nodes in nodes.gpu_nodes")
    else:
        yield fine("nodes.gpu_nodes", f"{len(enough)} nodes have what a job's pods ask for")
    products = {str(labels(node).get(PRODUCT)) for node in enough if PRODUCT in labels(node)}
    if len(products) > 1:
        said = f"the nodes have different GPUs ({', '.join(sorted(products))}): the slowest sets the pace, the smallest the memory"
        yield warning("nodes.gpu_nodes", said, f"list nodes that are alike, or nodes.selector {PRODUCT}")


def _tainted(nodes: Sequence[Object], spec: TrainingClusterSpec) -> Iterator[Finding]:
    """By taint, the nodes that take no pod of a job which says nothing of its own."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for taint in taints_of(node, spec):
            found[shown_taint(taint)].append(host(node))
    for shown, hosts in found.items():
        said = f"{named(hosts)} {'has' if len(hosts) == 1 else 'have'} the taint {shown}, which is not tolerated: jobs never land there"
        yield warning("pod.tolerations", said, "tolerate it there, if the nodes are meant for jobs; else leave them out of nodes.gpu_nodes")


def lint_storage(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    shared = spec.storage.mode is StorageMode.SHARED
    key, name = ("storage.class_rwx", spec.storage.class_rwx) if shared else ("storage.class_rwo", spec.storage.class_rwo)
    seen = facts.list("StorageClass")
    if not seen.seen:
        yield unknown(key, f"whether the class is there and what it can do: {seen.why_not}")
        return
    classes = {str(item["metadata"]["name"]): item for item in seen.items}
    judged = [judge_class(item, facts) for item in classes.values()]
    chosen = next((one for one in judged if one.name == name or (name is None and one.is_default)), None)
    if chosen is None:
        said = f"there is no storage class {name}" if name else "it is not set, and the cluster has no default class"
        yield failed(key, said, f"one of {', '.join(sorted(classes)) or 'none: an administrator makes one'}")
    elif not shared or chosen.shareable is Shareable.YES:
        yield fine(key, f"class {chosen.name}: {chosen.why}" if shared else f"class {chosen.name} is there")
    elif chosen.shareable is Shareable.NO:
        yield failed(
            key,
            f"class {chosen.name} is no ReadWriteMany class: {chosen.why}",
            _other_class([one.name for one in judged if one.shareable is Shareable.YES]),
        )
    elif chosen.shareable is Shareable.DOUBTFUL:
        yield warning(key, f"class {chosen.name}: {chosen.why}", "kubectl describe pvc says why; or storage.mode: volumeClaimTemplates")
    else:
        yield unknown(key, f"whether class {chosen.name} can be shared: {chosen.why}")


def _other_class(names: list[str]) -> str:
    return f"one of {', '.join(names)}" if names else "storage.mode: volumeClaimTemplates gives every pod volumes of its own"


def lint_rights(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Whether RDMA pods, which run as UID 0 with IPC_LOCK, are let in."""
    if not (spec.network.rdma.enabled and spec.security.ipc_lock):
        return
    if facts.pod_security in ("restricted", "baseline"):
        said = f"namespace {facts.namespace} enforces Pod Security {facts.pod_security}, which refuses pods with IPC_LOCK"
        fix = f"kubectl label namespace {facts.namespace} pod-security.kubernetes.io/enforce=privileged --overwrite, or network.rdma.memlock: unlimited"
        yield failed("security.ipc_lock", said, fix)
    if not facts.is_openshift:
        return
    seen, account = facts.list("SecurityContextConstraints"), spec.security.service_account
    allowing = {str(item["metadata"]["name"]) for item in seen.items if _lets_in(item)}
    if not seen.seen:
        yield unknown("security.ipc_lock", f"which SCC allows it: {seen.why_not}")
    elif not allowing:
        yield failed("security.ipc_lock", "no SCC allows IPC_LOCK to UID 0", OWN_SCC)
    elif facts.may_use_scc is None:
        yield unknown("security.ipc_lock", f"whether {account} may use one of {', '.join(sorted(allowing))}: you may not ask for it")
    elif not any(facts.may_use_scc.get(name) for name in allowing):
        narrow = sorted(str(item["metadata"]["name"]) for item in seen.items if _lets_in(item) and "*" not in item["allowedCapabilities"])
        fix = f"an administrator: oc adm policy add-scc-to-user {narrow[0]} -z {account} -n {facts.namespace}" if narrow else OWN_SCC
        said = f"service account {account} may use none of the SCCs that allow IPC_LOCK ({', '.join(sorted(allowing))})"
        yield failed("security.service_account", said, fix)
    else:
        usable = [item for item in seen.items if _lets_in(item) and facts.may_use_scc.get(item["metadata"]["name"])]
        shown = ", ".join(sorted(str(item["metadata"]["name"]) for item in usable))
        yield fine("security.ipc_lock", f"{account} may use {shown}")
        yield from _ungrouped(usable, shown)


def _ungrouped(sccs: Sequence[Object], shown: str) -> Iterator[Finding]:
    """The most restrictive one counts, so one with a group is enough."""
    if not any((scc.get("fsGroup") or {}).get("type") == "MustRunAs" for scc in sccs):
        said = f"{shown} gives RDMA pods no fsGroup: on a shared volume they and TCP pods can't write what the other kind has made"
        yield warning("security.ipc_lock", said, "an administrator: fsGroup: {type: MustRunAs} in it, as lockstep-rdma has it")


def _lets_in(scc: Object) -> bool:
    return allows_ipc_lock(scc) and (scc.get("runAsUser") or {}).get("type") == "RunAsAny"
