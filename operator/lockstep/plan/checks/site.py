"""Nodes and storage classes of a cluster against its file: what doctor and lint both look at (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.objects import Object
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, failed, fine, unknown, warning
from lockstep.plan.cluster.storageclasses import JudgedClass, Shareable, judge_class
from lockstep.plan.discovery.nodes import PRODUCT, host, labels
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.render.scheduling import usual_tolerations
from lockstep.plan.waiting.nodes import allocatable, lasting_taints, named, shown_taint
from lockstep_spec.choices import StorageMode

ROLE = "node-role.kubernetes.io/"


def usable_nodes(nodes: Iterable[Object], spec: TrainingClusterSpec) -> list[Object]:
    """Nodes that the cluster's names and labels allow, tainted ones too; control planes whose taint it doesn't tolerate only if named, or alone."""
    allowed = [node for node in nodes if _is_named(node, spec) and _has_labels(node, spec)]
    workers = [node for node in allowed if not any(taint["key"].startswith(ROLE) for taint in taints_of(node, spec))]
    return allowed if spec.nodes.gpu_nodes else workers or allowed


def taints_of(node: Object, spec: TrainingClusterSpec) -> list[Object]:
    """Taints that keep off pods which tolerate what the cluster says, and will tomorrow."""
    return lasting_taints(node, usual_tolerations(spec))


def _is_named(node: Object, spec: TrainingClusterSpec) -> bool:
    return not spec.nodes.gpu_nodes or host(node) in spec.nodes.gpu_nodes


def _has_labels(node: Object, spec: TrainingClusterSpec) -> bool:
    return all(labels(node).get(key) == value for key, value in spec.nodes.selector.items())


def check_nodes(spec: TrainingClusterSpec, facts: ClusterFacts, troubled: Collection[str] = ()) -> Iterator[Finding]:
    """Findings about names that don't exist, taints, too few nodes or GPUs, and nodes that differ. `troubled`: hosts that can't take pods for now."""
    nodes = facts.list("Node")
    if not nodes.seen:
        yield unknown("nodes.gpu_nodes", f"whether they exist, and what they have: {nodes.why_not}")
        return
    absent = sorted(set(spec.nodes.gpu_nodes) - set(map(host, nodes.items)))
    if absent:
        message = f"{named(absent)} {'is' if len(absent) == 1 else 'are'} not in the cluster"
        yield failed("nodes.gpu_nodes", message, "kubectl get nodes; then edit the list")
    allowed = usable_nodes(nodes.items, spec)
    able = [node for node in allowed if allocatable(node, GPU_RESOURCE) >= spec.gpus.per_node and host(node) not in troubled]
    enough = [node for node in able if not taints_of(node, spec)]
    # Taints of other nodes than those that the cluster names are worth a word only where too few nodes are left.
    if spec.nodes.gpu_nodes or len(enough) < spec.gpus.default_nodes:
        yield from _tainted(able, spec)
    if len(enough) < spec.gpus.default_nodes:
        needs = [f"{spec.gpus.per_node} GPUs a node"] if spec.gpus.per_node else []
        needs += ["no taint that keeps them off"] if len(enough) < len(able) else []
        message = f"a job has {spec.gpus.default_nodes} nodes unless it says otherwise; {len(enough)} of the {len(allowed)} nodes that the cluster allows can take its pods"
        message += f", which need {' and '.join(needs)}" if needs else ""
        yield failed("gpus.default_nodes", message, "fewer nodes, fewer gpus.per_node, or more nodes in nodes.gpu_nodes")
    else:
        yield fine("nodes.gpu_nodes", f"{len(enough)} nodes have what a job's pods ask for")
    products = {str(labels(node).get(PRODUCT)) for node in enough if PRODUCT in labels(node)}
    if len(products) > 1:
        message = f"the nodes have different GPUs ({', '.join(sorted(products))}): the slowest sets the pace, the smallest the memory"
        yield warning("nodes.gpu_nodes", message, f"list nodes that are alike, or nodes.selector {PRODUCT}")


def _tainted(nodes: Sequence[Object], spec: TrainingClusterSpec) -> Iterator[Finding]:
    """A finding for each taint that keeps off pods of a job with no tolerations of its own."""
    hosts_of: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for taint in taints_of(node, spec):
            hosts_of[shown_taint(taint)].append(host(node))
    for shown, hosts in hosts_of.items():
        message = f"{named(hosts)} {'has' if len(hosts) == 1 else 'have'} the taint {shown}, which is not tolerated: jobs never land there"
        yield warning(
            "pod.tolerations", message, "tolerate it there, if the nodes are meant for jobs; else leave them out of nodes.gpu_nodes"
        )


def check_storage(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """One finding about the class of the volumes: is it there, and can all pods share it if they must."""
    shared = spec.storage.mode is StorageMode.SHARED
    key, name = ("storage.class_rwx", spec.storage.class_rwx) if shared else ("storage.class_rwo", spec.storage.class_rwo)
    classes = facts.list("StorageClass")
    if not classes.seen:
        yield unknown(key, f"whether the class is there and what it can do: {classes.why_not}")
        return
    judged = [judge_class(item, facts) for item in classes.items]
    chosen = next((one for one in judged if one.name == name or (name is None and one.is_default)), None)
    if chosen is None:
        message = f"there is no storage class {name}" if name else "no class is set, and the cluster has no default class"
        names = ", ".join(sorted(one.name for one in judged))
        yield failed(key, message, f"one of {names}" if names else "an administrator makes one")
        return
    title = f"class {chosen.name}" if name else f"no class is set, so claims get the default class {chosen.name}"
    if not shared:
        yield fine(key, f"{title} is there" if name else title)
    else:
        yield _shareable(key, title, chosen, [one.name for one in judged if one.shareable is Shareable.YES])


def _shareable(key: str, title: str, chosen: JudgedClass, others: list[str]) -> Finding:
    if chosen.shareable is Shareable.YES:
        return fine(key, f"{title}: {chosen.why}")
    if chosen.shareable is Shareable.NO:
        fix = f"one of {', '.join(others)}" if others else "storage.mode: volumeClaimTemplates gives every pod volumes of its own"
        return failed(key, f"class {chosen.name} is not ReadWriteMany: {chosen.why}", fix)
    if chosen.shareable is Shareable.DOUBTFUL:
        return warning(key, f"{title}: {chosen.why}", "kubectl describe pvc says why; or storage.mode: volumeClaimTemplates")
    return unknown(key, f"whether class {chosen.name} can be shared: {chosen.why}")
