"""The RDMA rails: which Multus networks and counted devices belong together, and how sure that is; and hardware that a cluster or hosts
have and that a cluster file leaves unused: one report for discover, lint and doctor (pure).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.objects import Object
from lockstep.plan.cluster.facts import NETWORK, ClusterFacts, ProbeFacts, Sight
from lockstep.plan.cluster.finding import Finding, note, warning
from lockstep.plan.cluster.railnetworks import (
    SHARING,
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
from lockstep.plan.discovery.nodes import ACCELERATOR, Group, accelerators, gpu_groups, host, labels
from lockstep.plan.render.fabric import EFA, GPU_RESOURCE
from lockstep.plan.waiting.nodes import allocatable
from lockstep_spec.words import any_of, listed, number_of

_NOT_NICS = any_of(
    ACCELERATOR.pattern,
    re.escape(GPU_RESOURCE),
    r"nvidia\.com/[A-Z]|intel\.com/(qat|sgx)|devices\.kubevirt\.io/|hugepages-",
    r".*\.IP$",
)
"""Accelerators and the like, and GKE's count of a network's addresses, which it asks for by itself."""
SHARED = "rdma/"
"""Prefix of the RDMA shared device plugin's resources, unless it is configured otherwise."""
ALONE = {
    re.escape(EFA): "EFA needs no network of its own; the image needs aws-ofi-nccl",
    "aliyun/erdma": "eRDMA needs no network of its own",
    r"rdma/(.*[^a-z])?(ib|infiniband)([^a-z].*)?": "InfiniBand by its name, which needs no address",
    ".*/mlnxnics": "InfiniBand's VFs, which need no address",
    "nvidia.com/sriov-rdma-vf": (
        "OKE's; a pod also needs its network, which isn't seen here: its guide makes sriov-rdma-vf in namespace default"
    ),
    "networking.gke.io.networks/rdma-.*": (
        "a pod also needs GKE's annotation networking.gke.io/interfaces (a job's podTemplate.annotations)"
    ),
}
"""Resources that their clouds' own guides ask for without a Multus network → what else there is to know."""
NFD_RDMA = ("feature.node.kubernetes.io/rdma.capable", "feature.node.kubernetes.io/rdma.available")
RAILS_MAX = 32


@dataclass(frozen=True)
class FoundRail:
    """A resource that counts NICs, with the network that attaches them."""

    network: RailNetwork | None
    """None: the resource alone brings the NIC."""
    resource: str
    matched: str
    """Evidence that they belong together."""
    is_rdma: bool
    why: str

    @property
    def name(self) -> str:
        return self.resource if self.network is None else self.network.name


def nic_resources(nodes: Sequence[Object], stated: Collection[str] = ()) -> list[str]:
    """Extended resources of these nodes that could count NICs. `stated`: those that networks name; others below nvidia.com/ must speak of
    RDMA.
    """
    names = {
        name
        for node in nodes
        for name in node.get("status", {}).get("allocatable", {})
        if "/" in name
        and not _NOT_NICS.match(name)
        and (not name.startswith("nvidia.com/") or name in stated or speaks_of_rdma(name))
        and allocatable(node, name)
    }
    return sorted(names, key=natural)


def rdma_resources(nodes: Sequence[Object]) -> list[str]:
    """List the extended resources of these nodes whose names speak of RDMA."""
    return [name for name in nic_resources(nodes) if speaks_of_rdma(name)]


def find_rails(facts: ClusterFacts, nodes: Sequence[Object]) -> list[FoundRail]:
    """Every network with a counted device, in the order of the names, then resources that need none. Without a view of nodes, networks that
    name their resource.

    Networks of namespace default, which Multus gives to every pod, are looked at where the namespace's own leave a resource over.
    """
    own, everybodys = (
        sorted(map(read_network, listing.items), key=lambda network: natural(network.of(facts.namespace)))
        for listing in (facts.list(NETWORK), facts.networks_of("default"))
    )
    stated_by = {network.resource for network in (*own, *everybodys) if network.resource is not None}
    resources = nic_resources(nodes, stated_by) if facts.list("Node").seen else None
    rails: list[FoundRail] = []
    for networks in (own, everybodys if facts.namespace != "default" else []):
        taken = {rail.resource for rail in rails}
        for network in networks:
            resource, matched = _resource_of(network, resources)
            if resource is not None and resource not in taken:
                rails.append(FoundRail(network, resource, matched, *_is_rdma(network, resource, facts)))
    left = [resource for resource in resources or [] if resource not in {rail.resource for rail in rails}]
    return rails + [FoundRail(None, one, why, True, "its name says so") for one in left if (why := _why_alone(one, facts.probes))]


def _resource_of(network: RailNetwork, resources: list[str] | None) -> tuple[str | None, str]:
    if network.resource is not None:
        return (network.resource, "the network's annotation") if resources is None or network.resource in resources else (None, "")
    words = {resource: re.split(r"[-_./]", resource.lower()) for resource in resources or []}
    shared = [one for one in words if is_shared(one) and network.plugin in SHARING]
    infiniband = [one for one in shared if _why_alone(one, ())]
    shared = infiniband or shared if network.plugin == "ipoib" else [one for one in shared if one not in infiniband]
    named = [one for one in words if network.interface and network.interface.lower() in words[one]]
    guesses = (
        (named, f"its interface {network.interface} is part of the name"),
        ([one for one in words if stem(one) == stem(network.name)], "a guess: their names are alike"),
        (shared, f"a guess: {network.plugin} stands over a NIC that pods share, and no other resource is for such NICs"),
        ([one for one in shared if words[one][-1] == re.split(r"[-_.]", network.name)[-1]], "a guess: their names end alike"),
    )
    return next(((alike[0], why) for alike, why in guesses if len(alike) == 1), (None, ""))


def is_shared(resource: str) -> bool:
    """Return True if its number isn't one of NICs: every slot brings the same devices."""
    return resource.startswith((SHARED, "aliyun/")) or "shared" in resource


def _is_rdma(network: RailNetwork, resource: str, facts: ClusterFacts) -> tuple[bool, str]:
    for policy in sriov_policies(resource, facts)[:1]:
        is_rdma = bool(policy["spec"].get("isRdma"))
        return is_rdma, f"SR-IOV policy {policy['metadata']['name']} says isRdma: {'true' if is_rdma else 'false'}"
    if network.is_rdma:
        return True, "its chain has the plugin rdma"
    if network.plugin == "ib-sriov":
        return True, "its plugin is ib-sriov"
    named = speaks_of_rdma(resource, network.name)
    return named, "its name says so" if named else "nothing says that it is RDMA"


def _why_alone(resource: str, probes: Sequence[ProbeFacts]) -> str:
    """Return what shows that a pod needs no Multus network to use it; '' where nothing does."""
    known = next((why for pattern, why in ALONE.items() if re.fullmatch(pattern, resource)), "")
    is_seen = resource.startswith(SHARED) and any("InfiniBand" in hca for probe in probes for hca in probe.hcas.values())
    return known or ("probe pods see InfiniBand, which needs no address" if is_seen else "")


def _fewest(resource: str, nodes: Sequence[Object]) -> int:
    """Count the resource on the node with the fewest, of those that have some; 0 where none is seen."""
    return int(min((count for node in nodes if (count := allocatable(node, resource))), default=0))


def _nics(rail: FoundRail, rails: Sequence[FoundRail], nodes: Sequence[Object], gpus: int, facts: ClusterFacts) -> int:
    """Count the NICs that one pod takes by this rail: one, or all of a node where no other rail is left and their number suits the GPUs."""
    others = set(rdma_resources(nodes)) - {rail.resource}
    if len(rails) > 1 or others or is_shared(rail.resource):
        return 1
    of_each = max((int(policy["spec"].get("numVfs") or 1) for policy in sriov_policies(rail.resource, facts)), default=1)
    nics = (_fewest(rail.resource, nodes) or RAILS_MAX) // of_each
    suits = rail.resource == EFA or (nics and gpus and (nics in (gpus, 2 * gpus) or gpus % nics == 0))
    return min(nics, RAILS_MAX) if suits else 1


def rdma_entries(facts: ClusterFacts, groups: Sequence[Group]) -> Iterator[Entry]:
    """The section `network`."""
    nodes = groups[0].nodes if groups else facts.list("Node").items
    candidates = find_rails(facts, nodes)
    rails: list[FoundRail] = []
    for rail in (one for one in candidates if one.is_rdma):
        if sum(one.resource == rail.resource for one in rails) < (_fewest(rail.resource, nodes) or RAILS_MAX):
            rails.append(rail)
    if not rails:
        yield from _no_rails(facts, candidates, nodes)
        return
    gpus = groups[0].gpus if groups else 0
    nics = {rail: _nics(rail, rails, nodes, gpus, facts) for rail in rails}
    attached = sum(nics[rail] for rail in rails if rail.network is not None)
    yield from _mtu(facts, rails)
    labeled = [node for node in nodes if any(labels(node).get(key) == "true" for key in NFD_RDMA)]
    nfd = f"; {len(labeled)} of {len(nodes)} nodes are labeled rdma.capable" if labeled else ""
    yield stated("network.rdma.enabled", True, f"{number_of(sum(nics.values()), 'rail')} found{nfd}")
    yield from _rails(facts, nics, nodes, [rail.name for rail in candidates if rail.is_rdma and rail not in nics])
    if attached:
        interfaces = ",".join(f"net{number}" for number in range(1, attached + 1))
        yield stated("network.rdma.interfaces", interfaces, "Multus names them so, in the order of rails")
    if any(rail.resource == EFA for rail in rails):
        yield from _memlock(facts.probes)
        return  # the rest is InfiniBand's and RoCE's
    yield from _devices(facts.probes)
    yield _cross_nic([rail.network for rail in rails if rail.network is not None])
    yield left_out("network.rdma.rate", 400, "Gb/s of every port, as ibstat in a pod shows it: preflight warns of a slower one")
    yield left_out("network.rdma.gid_index", 3, "NCCL finds the RoCEv2 entry itself (2.21 and newer)")
    yield from _memlock(facts.probes)
    yield left_out(
        "network.rdma.dmabuf", True, "DMA-BUF is NCCL's default; say true if nvidia-peermem is not loaded and DMA-BUF was switched off"
    )


def _no_rails(facts: ClusterFacts, candidates: Sequence[FoundRail], nodes: Sequence[Object]) -> Iterator[Entry]:
    networks, unused = facts.list(NETWORK), rdma_resources(nodes)
    hcas = sorted({name for probe in facts.probes for name in probe.hcas})
    evidence = [f"{rail.name} with {rail.resource}: {rail.why}" for rail in candidates]
    evidence += [f"nodes have {name}, which no network seen here uses" for name in unused]
    evidence += [f"probe pods see {', '.join(hcas)}"] if hcas else []
    more = f" ({'; '.join(evidence)})" if evidence else ""
    why = networks.why_not or f"no Multus network with an RDMA device was seen in namespace {facts.namespace}"
    yield stated("network.rdma.enabled", False, f"{why}{more}; a job that asks for RDMA is refused, not given TCP")
    make = unknown if networks.sight is Sight.FORBIDDEN else left_out
    shared = [Item({"resource": name}) for name in unused if name.startswith(SHARED)]
    example = shared or [Item({"network": "eno5np0-network", "resource": "openshift.io/eno5np0rdma"})]
    alone = "; of the RDMA shared device plugin the resource alone, where NICs need no network of their own (InfiniBand)" if shared else ""
    yield make("network.rdma.rails", example, f"one entry a NIC: its Multus network, and the resource that counts it{alone}")
    yield stated("network.tcp.interface_exclude", "^lo,docker0", "every interface but these; the default")


def _rails(facts: ClusterFacts, nics: Mapping[FoundRail, int], nodes: Sequence[Object], beyond: Sequence[str]) -> Iterator[Entry]:
    items = []
    for rail, count in nics.items():
        without = [host(node) for node in nodes if not allocatable(node, rail.resource)]
        lacking = f"; not on {listed(without)}" if without else ""
        fewest = _fewest(rail.resource, nodes)
        more = fewest > count and not is_shared(rail.resource)
        several = f"; nodes have {fewest} of it: one entry like this for each that a pod is to have" if more else ""
        network = {} if rail.network is None else {"network": rail.network.of(facts.namespace)}
        items.append(Item(network | {"resource": rail.resource}, f"{rail.matched}; RDMA: {rail.why}{lacking}{several}"))
        items += [Item(items[-1].value)] * (count - 1)
    source = "NetworkAttachmentDefinitions with the extended resources of the nodes; net1 is the first"
    source += f"; left out, since nodes have no more of their NICs: {listed(beyond)}" if beyond else ""
    yield stated("network.rdma.rails", items, source)


def _mtu(facts: ClusterFacts, rails: Sequence[FoundRail]) -> Iterator[Entry]:
    stated_by = {rail.name: mtu_of(rail.network, rail.resource, facts) for rail in rails}
    values = {mtu for mtu in stated_by.values() if mtu is not None}
    if len(values) == 1 and None not in stated_by.values():
        yield stated("network.mtu", values.pop(), "the same for all rails, by networks and SR-IOV policies")
    elif values:
        mtus = ", ".join(f"{name} {mtu or 'unknown'}" for name, mtu in stated_by.items())
        yield left_out("network.mtu", max(values), f"not the same for all rails: {mtus}")
    elif any(rail.network is not None for rail in rails):
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
