"""The RDMA rails: which Multus networks and counted devices belong together, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.api.objects import Object
from lockstep.plan.cluster.facts import ClusterFacts, ProbeFacts, Sight
from lockstep.plan.cluster.railnetworks import (
    RailNetwork,
    are_isolated,
    mtu_of,
    natural,
    read_network,
    speaks_of_rdma,
    sriov_policies,
    stem,
)
from lockstep.plan.discovery.draft import Entry, Item, left_out, stated, unknown
from lockstep.plan.discovery.nodes import Group, host
from lockstep.plan.waiting.nodes import allocatable
from lockstep_spec.words import listed, number_of

NOT_NICS = ("nvidia.com/", "amd.com/", "intel.com/qat", "devices.kubevirt.io/", "hugepages-")
SHARED = "rdma/"
"""Prefix of the RDMA shared device plugin's resources, unless it is configured otherwise."""
NOT_WITHOUT = "a job that asks for RDMA is refused, not given TCP"
NFD_RDMA = ("feature.node.kubernetes.io/rdma.capable", "feature.node.kubernetes.io/rdma.available")


@dataclass(frozen=True)
class FoundRail:
    """A network with the resource that counts it."""

    network: RailNetwork
    resource: str
    matched: str
    """Evidence that they belong together."""
    is_rdma: bool
    why: str


def nic_resources(nodes: Sequence[Object]) -> list[str]:
    """Extended resources of these nodes that could count NICs."""
    names = {
        name
        for node in nodes
        for name in node.get("status", {}).get("allocatable", {})
        if "/" in name and not name.startswith(NOT_NICS) and allocatable(node, name)
    }
    return sorted(names, key=natural)


def find_rails(facts: ClusterFacts, nodes: Sequence[Object]) -> list[FoundRail]:
    """Every network with a counted device, in the order of the names. Without a view of nodes, networks that name their resource."""
    resources = nic_resources(nodes) if facts.list("Node").seen else None
    rails = []
    for network in map(read_network, facts.list("NetworkAttachmentDefinition").items):
        resource, matched = _resource_of(network, resources)
        if resource is not None:
            is_rdma, why = _is_rdma(network, resource, facts)
            rails.append(FoundRail(network, resource, matched, is_rdma, why))
    return sorted(rails, key=lambda rail: natural(rail.network.of(facts.namespace)))


def _resource_of(network: RailNetwork, resources: list[str] | None) -> tuple[str | None, str]:
    if network.resource is not None:
        return (network.resource, "the network's annotation") if resources is None or network.resource in resources else (None, "")
    alike = [resource for resource in resources or [] if stem(resource) == stem(network.name)]
    return (alike[0], "a guess: their names are alike") if len(alike) == 1 else (None, "")


def _is_rdma(network: RailNetwork, resource: str, facts: ClusterFacts) -> tuple[bool, str]:
    for policy in sriov_policies(resource, facts)[:1]:
        is_rdma = bool(policy["spec"].get("isRdma"))
        return is_rdma, f"SR-IOV policy {policy['metadata']['name']} says isRdma: {'true' if is_rdma else 'false'}"
    if network.plugin == "ib-sriov":
        return True, "its plugin is ib-sriov"
    named = speaks_of_rdma(resource, network.name)
    return named, "its name says so" if named else "nothing says that it is RDMA"


def rdma_entries(facts: ClusterFacts, groups: Sequence[Group]) -> Iterator[Entry]:
    """The section `network`."""
    nodes = groups[0].nodes if groups else facts.list("Node").items
    candidates = find_rails(facts, nodes)
    rails = [rail for rail in candidates if rail.is_rdma]
    if not rails:
        yield from _no_rails(facts, candidates, nodes)
        return
    yield from _mtu(facts, rails)
    yield stated("network.rdma.enabled", True, _enabled_because(facts, nodes, len(rails)))
    yield from _rails(facts, rails, nodes)
    interfaces = ",".join(f"net{number}" for number in range(1, len(rails) + 1))
    yield stated("network.rdma.interfaces", interfaces, "Multus names them so, in the order of rails")
    yield from _devices(facts.probes)
    yield _cross_nic([rail.network for rail in rails])
    yield left_out("network.rdma.rate", 400, "Gb/s of every port, as ibstat in a pod shows it: preflight warns of a slower one")
    yield left_out("network.rdma.gid_index", 3, "NCCL finds the RoCEv2 entry itself (2.21 and newer)")
    yield from _memlock(facts.probes)
    yield left_out(
        "network.rdma.dmabuf", True, "DMA-BUF is NCCL's default; say true if nvidia-peermem is not loaded and DMA-BUF was switched off"
    )


def _no_rails(facts: ClusterFacts, candidates: Sequence[FoundRail], nodes: Sequence[Object]) -> Iterator[Entry]:
    networks, unused = facts.list("NetworkAttachmentDefinition"), [name for name in nic_resources(nodes) if speaks_of_rdma(name)]
    hcas = sorted({name for probe in facts.probes for name in probe.hcas})
    evidence = [f"{rail.network.name} with {rail.resource}: {rail.why}" for rail in candidates]
    evidence += [f"nodes have {name}, which no network seen here uses" for name in unused]
    evidence += [f"probe pods see {', '.join(hcas)}"] if hcas else []
    more = f" ({'; '.join(evidence)})" if evidence else ""
    why = networks.why_not or f"no Multus network with an RDMA device was seen in namespace {facts.namespace}"
    yield stated("network.rdma.enabled", False, f"{why}{more}; {NOT_WITHOUT}")
    make = unknown if networks.sight is Sight.FORBIDDEN else left_out
    shared = [Item({"resource": name}) for name in unused if name.startswith(SHARED)]
    example = shared or [Item({"network": "eno5np0-network", "resource": "openshift.io/eno5np0rdma"})]
    alone = "; of the RDMA shared device plugin the resource alone, where NICs need no network of their own (InfiniBand)" if shared else ""
    yield make("network.rdma.rails", example, f"one entry a NIC: its Multus network, and the resource that counts it{alone}")
    yield stated("network.tcp.interface_exclude", "^lo,docker0", "every interface but these; the default")


def _enabled_because(facts: ClusterFacts, nodes: Sequence[Object], rails: int) -> str:
    labeled = [node for node in nodes if any((node["metadata"].get("labels") or {}).get(key) == "true" for key in NFD_RDMA)]
    nfd = f"; {len(labeled)} of {len(nodes)} nodes are labeled rdma.capable" if labeled else ""
    return f"{number_of(rails, 'rail')} found{nfd}"


def _rails(facts: ClusterFacts, rails: Sequence[FoundRail], nodes: Sequence[Object]) -> Iterator[Entry]:
    items = []
    for rail in rails:
        without = [host(node) for node in nodes if not allocatable(node, rail.resource)]
        lacking = f"; not on {listed(without)}" if without else ""
        fewest = min((allocatable(node, rail.resource) for node in nodes if host(node) not in without), default=0)
        several = f"; nodes have {fewest} of it: one entry like this for each that a pod is to have" if fewest > 1 else ""
        value = {"network": rail.network.of(facts.namespace), "resource": rail.resource}
        items.append(Item(value, f"{rail.matched}; RDMA: {rail.why}{lacking}{several}"))
    yield stated("network.rdma.rails", items, "NetworkAttachmentDefinitions with the extended resources of the nodes; net1 is the first")


def _mtu(facts: ClusterFacts, rails: Sequence[FoundRail]) -> Iterator[Entry]:
    stated_by = {rail.network.name: mtu_of(rail.network, rail.resource, facts) for rail in rails}
    values = {mtu for mtu in stated_by.values() if mtu is not None}
    if len(values) == 1 and None not in stated_by.values():
        yield stated("network.mtu", values.pop(), "the same for all rails, by networks and SR-IOV policies")
    elif values:
        mtus = ", ".join(f"{name} {mtu or 'unknown'}" for name, mtu in stated_by.items())
        yield left_out("network.mtu", max(values), f"not the same for all rails: {mtus}")
    else:
        yield unknown("network.mtu", 9000, "neither networks nor SR-IOV policies say it")


def _devices(probes: Sequence[ProbeFacts]) -> Iterator[Entry]:
    why = "NCCL takes every device of the pod; names differ from node to node, and a wrong one halves the speed"
    lists = {tuple(sorted(probe.hcas, key=natural)) for probe in probes if probe.hcas}
    if len(lists) == 1:
        yield left_out(
            "network.rdma.devices", ",".join(lists.pop()), f"{why}. Probe pods see these on every node, some maybe not the pod's own"
        )
    else:
        yield left_out("network.rdma.devices", "mlx5_0,mlx5_1", why)


def _cross_nic(networks: Sequence[RailNetwork]) -> Entry:
    if are_isolated(networks):
        return stated("network.rdma.cross_nic", 0, "rails are subnets of their own without routes: a NIC reaches only its own rail")
    return left_out("network.rdma.cross_nic", 0, "0 only where rails don't reach each other")


def _memlock(probes: Sequence[ProbeFacts]) -> Iterator[Entry]:
    if is_unlimited(probes):
        yield stated("network.rdma.memlock", "unlimited", "probe pods have no limit on locked memory: the runtime lifted it")


def is_unlimited(probes: Sequence[ProbeFacts]) -> bool:
    """Every probe found no limit on locked memory."""
    answered = [probe for probe in probes if not probe.error]
    return bool(answered) and all(probe.memlock_bytes is None for probe in answered)
