"""Nodes that a job can use, and what they have: the largest group of nodes that are alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.api.names import LABEL_HOSTNAME
from lockstep.api.objects import Object, is_true
from lockstep.api.quantity import amount
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.discovery.draft import Entry, Item, left_out, stated, unknown
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.render.scheduling import GPU_TOLERATION
from lockstep.plan.waiting.nodes import allocatable, lasting_taints
from lockstep_spec.words import any_of, listed, number_of

PRODUCT = "nvidia.com/gpu.product"
GPU_MEMORY = "nvidia.com/gpu.memory"
"""Label of nodes with a GPU's memory in MiB, by NVIDIA's GPU feature discovery."""
GPU_COUNT, REPLICAS = "nvidia.com/gpu.count", "nvidia.com/gpu.replicas"
ACCELERATOR = any_of(
    r"nvidia\.com/(gpu\.shared|mig-.+)",
    r"amd\.com/(gpu|[a-z]px)",
    r"gpu\.intel\.com/|habana\.ai/",
    r"aws\.amazon\.com/neuron|google\.com/tpu|huawei\.com/Ascend",
)
"""Resources that are accelerators, or parts of GPUs, and that Lockstep's pods don't ask for."""
RACKS = ("topology.kubernetes.io/rack", "topology.rook.io/rack", "rack")
NODES_LISTED = 1024
QUOTA_GPUS = f"requests.{GPU_RESOURCE}"


@dataclass(frozen=True)
class Group:
    """Nodes with the same GPUs."""

    product: str
    gpus: int
    nodes: tuple[Object, ...]

    @property
    def name(self) -> str:
        return f"{self.gpus} × {self.product or 'GPU'}"


def gpu_groups(facts: ClusterFacts) -> list[Group]:
    """The nodes with GPUs, the group with the most of them first."""
    alike: dict[tuple[str, int], list[Object]] = defaultdict(list)
    for node in facts.list("Node").items:
        if gpus := gpus_of(node)[0]:
            alike[(str(labels(node).get(PRODUCT, "")).removesuffix("-SHARED"), gpus)].append(node)
    groups = [Group(product, gpus, tuple(sorted(nodes, key=host))) for (product, gpus), nodes in alike.items()]
    return sorted(groups, key=lambda group: (-group.gpus * len(group.nodes), group.name))


def gpus_of(node: Object) -> tuple[int, str]:
    """Count the GPUs of a node that ranks of one job can have; say why they are fewer than what it counts, or ''."""
    slots = int(allocatable(node, GPU_RESOURCE))
    physical, replicas = (int(text) if (text := str(labels(node).get(key, ""))).isdecimal() else 0 for key in (GPU_COUNT, REPLICAS))
    if "-MIG-" in str(labels(node).get(PRODUCT, "")):
        return min(slots, 1), f"its {slots} {GPU_RESOURCE} are slices (MIG), and NCCL joins no two slices of one GPU"
    gpus = min(slots, physical or slots, max(1, slots // max(1, replicas)))
    why = f"its {slots} {GPU_RESOURCE} are slots of {number_of(gpus, 'GPU')} (time slicing, MPS), and NCCL refuses two ranks on one GPU"
    return gpus, why if gpus < slots else ""


def accelerators(nodes: Sequence[Object]) -> dict[str, str]:
    """Map accelerators that Lockstep doesn't use to where they are."""
    where: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for resource in node.get("status", {}).get("allocatable", {}):
            if ACCELERATOR.match(resource) and allocatable(node, resource):
                where[resource].append(f"{allocatable(node, resource)} on {host(node)}")
    return {resource: listed(places) for resource, places in sorted(where.items())}


def labels(node: Object) -> Mapping[str, str]:
    return node["metadata"].get("labels") or {}


def host(node: Object) -> str:
    return str(labels(node).get(LABEL_HOSTNAME, node["metadata"]["name"]))


def worth_saying(node: Object) -> str:
    """Conditions that keep pods off this node, or could."""
    status, spec = node.get("status", {}), node.get("spec", {})
    notes = [] if is_true(status, "Ready") else ["not Ready"]
    notes += ["cordoned"] if spec.get("unschedulable") else []
    notes += [f"tainted {taint['key']}:{taint['effect']}" for taint in spec.get("taints") or [] if "node.kubernetes.io" not in taint["key"]]
    return ", ".join(notes)


def node_entries(facts: ClusterFacts, groups: Sequence[Group]) -> Iterator[Entry]:
    listing = facts.list("Node")
    if not listing.seen:
        yield unknown("nodes.gpu_nodes", [Item("gpu-node-1")], f"{listing.why_not}. Left out, any node may be used")
        yield from _rack(())
        return
    if not groups:
        yield left_out(
            "nodes.gpu_nodes", [Item(host(node), worth_saying(node)) for node in listing.items[:4]], "no node has GPUs: any may be used"
        )
        yield from _rack(listing.items)
        return
    best, *others = groups
    source = f"the {len(best.nodes)} nodes with {best.name}, by allocatable {GPU_RESOURCE} and the label {PRODUCT}"
    if others:
        source += "; left out, since ranks should be alike: " + "; ".join(
            f"{', '.join(map(host, one.nodes))} ({one.name})" for one in others
        )
    yield stated(
        "nodes.gpu_nodes",
        [Item(host(node), worth_saying(node)) for node in best.nodes[:NODES_LISTED]],
        f"{source}. Remove those that aren't yours",
    )
    yield from _rack(best.nodes)


def _rack(nodes: Sequence[Object]) -> Iterator[Entry]:
    named = next((key for key in RACKS if nodes and all(key in labels(node) for node in nodes)), None)
    if named is not None:
        racks = sorted({labels(node)[named] for node in nodes})
        yield stated("nodes.rack_label", named, f"a label of all of them; racks: {', '.join(racks)}")
    else:
        yield left_out("nodes.rack_label", RACKS[0], "no node label that names a rack was seen")


def common_tolerations(nodes: Sequence[Object]) -> list[Object]:
    """Tolerations of the taints that keep pods with GPUs off every one of these nodes; a node's own is its own affair."""
    each = [{(taint["key"], taint.get("value", ""), taint["effect"]) for taint in lasting_taints(node, [GPU_TOLERATION])} for node in nodes]
    return [_tolerating(*taint) for taint in sorted(set.intersection(*each))] if each else []


def _tolerating(key: str, value: str, effect: str) -> Object:
    return {"key": key, **({"operator": "Equal", "value": value} if value else {"operator": "Exists"}), "effect": effect}


def pod_entries(facts: ClusterFacts, groups: Sequence[Group]) -> Iterator[Entry]:
    """The section `pod`, where the nodes with GPUs have taints."""
    listing = facts.list("Node")
    if not listing.seen:
        yield unknown("pod.tolerations", [Item({"key": "dedicated", "operator": "Exists"})], f"which taints nodes have: {listing.why_not}")
        return
    tolerations = common_tolerations(groups[0].nodes) if groups else []
    if tolerations:
        source = (
            f"taints of all of nodes.gpu_nodes, besides {GPU_RESOURCE}'s, which is tolerated anyhow. Remove those that aren't meant for you"
        )
        yield stated("pod.tolerations", [Item(toleration) for toleration in tolerations], source)


def gpu_entries(facts: ClusterFacts, groups: Sequence[Group]) -> Iterator[Entry]:
    listing, probed = facts.list("Node"), max((probe.gpus for probe in facts.probes), default=0)
    if not listing.seen:
        if probed:
            yield stated("gpus.per_node", probed, "devices that a probe pod was given")
        else:
            yield unknown("gpus.per_node", 4, f"{listing.why_not}; 0 where ranks run on the CPU")
        yield unknown("gpus.type", "NVIDIA H100 80GB HBM3", listing.why_not)
        yield default_nodes(facts, probed, 2)
        return
    others = "".join(f". {resource}, which Lockstep doesn't use: {where}" for resource, where in accelerators(listing.items).items())
    if not groups:
        yield stated("gpus.per_node", 0, f"no node has {GPU_RESOURCE}: ranks run on the CPU{others}")
        yield default_nodes(facts, 0, len(listing.items))
        return
    best = groups[0]
    why = "".join(f"; of {host(node)}, {why}" for node in best.nodes[:1] if (why := gpus_of(node)[1]))
    yield stated("gpus.per_node", best.gpus, f"allocatable {GPU_RESOURCE} of these nodes{why}{others}")
    if best.product:
        yield stated("gpus.type", best.product.replace("-", " "), f"label {PRODUCT}{_gpu_memory(best)}")
    else:
        yield unknown("gpus.type", "NVIDIA H100 80GB HBM3", f"the nodes have no label {PRODUCT} (GPU feature discovery sets it)")
    yield default_nodes(facts, best.gpus, len(best.nodes))


def _gpu_memory(group: Group) -> str:
    memory = labels(group.nodes[0]).get(GPU_MEMORY, "")
    return f", {int(memory) / 1024:.0f} GiB each by {GPU_MEMORY}" if memory.isdecimal() else ""


def default_nodes(facts: ClusterFacts, gpus: int, nodes: int) -> Entry:
    """Two, or as many as there are, or as the quota gives."""
    best = max(1, min(2, nodes))
    for quota in facts.list("ResourceQuota").items:
        hard = amount((quota.get("spec", {}).get("hard") or {}).get(QUOTA_GPUS, "none"))
        if hard is not None and gpus and hard < best * gpus:
            fits = max(1, int(hard // gpus))
            return stated(
                "gpus.default_nodes", fits, f"quota {quota['metadata']['name']} gives {hard:f} GPUs in namespace {facts.namespace}"
            )
    return stated("gpus.default_nodes", best, "nodes of a job that doesn't say; a choice, not a finding")
