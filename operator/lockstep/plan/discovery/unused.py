"""Hardware that a cluster or hosts have and that a cluster file leaves unused: one report for discover, lint and doctor (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, note, warning
from lockstep.plan.cluster.railnetworks import mtu_of
from lockstep.plan.discovery.nodes import accelerators, gpu_groups, host
from lockstep.plan.discovery.rails import find_rails, rdma_resources
from lockstep_spec.words import listed


@dataclass(frozen=True)
class Hardware:
    """Hardware that was seen."""

    rdma: Mapping[str, str] = field(default_factory=dict)
    """Resource of RDMA NICs, or a machine that has some → what it has, in words."""
    gpus: int = 0
    """GPUs of each of the nodes that are most alike."""
    accelerators: Mapping[str, str] = field(default_factory=dict)
    """Resource that Lockstep's pods don't ask for → where it is."""
    mtu: int | None = None
    """MTU of the rails, where it is the same for all."""


def cluster_hardware(facts: ClusterFacts, spec: TrainingClusterSpec) -> Hardware:
    """Collect the hardware of the nodes that the file names, else of the largest group with GPUs."""
    named = set(spec.nodes.gpu_nodes)
    group = next((one for one in gpu_groups(facts) if not named or named & set(map(host, one.nodes))), None)
    nodes = group.nodes if group else facts.list("Node").items
    rails = [rail for rail in find_rails(facts, nodes) if rail.is_rdma]
    rdma = {resource: f"nodes have {resource}" for resource in rdma_resources(nodes)}
    rdma |= {rail.resource: f"network {rail.network.name} has {rail.resource}" for rail in rails if rail.network is not None}
    if not rdma:
        rdma = {probe.node: f"node {probe.node} has {', '.join(probe.hcas)}" for probe in facts.probes if probe.hcas}
    mtus = {mtu_of(rail.network, rail.resource, facts) for rail in rails}
    return Hardware(rdma, group.gpus if group else 0, accelerators(facts.list("Node").items), mtus.pop() if len(mtus) == 1 else None)


def unused(spec: TrainingClusterSpec, hardware: Hardware) -> Iterator[Finding]:
    """Find hardware that the file doesn't use."""
    rdma, stated = spec.network.rdma, {rail.resource for rail in spec.network.rdma.rails}
    left = [words for name, words in hardware.rdma.items() if name not in stated]
    if left and not rdma.enabled:
        message = f"{listed(left)}, and the file leaves RDMA off: ranks send over TCP, many times slower"
        yield warning("network.rdma.enabled", message, "write true, with rails on Kubernetes, if the nodes' NICs reach each other")
    elif left and rdma.rails:
        yield note("network.rdma.rails", f"{listed(left)}, and no rail names it", "one rail a NIC, if jobs are to use it")
    if hardware.gpus > spec.gpus.per_node:
        message = f"nodes have {hardware.gpus} GPUs, and gpus.per_node is {spec.gpus.per_node}: jobs use no more unless they say so"
        yield note("gpus.per_node", message, f"write {hardware.gpus} if jobs are to use them all")
    for resource, where in hardware.accelerators.items():
        yield note("gpus", f"there is {resource}, which Lockstep doesn't use: {where}")
    if rdma.enabled and hardware.mtu is not None and spec.network.mtu is None:
        yield note("network.mtu", f"the rails have {hardware.mtu}, and the file doesn't state it", f"write {hardware.mtu}")
