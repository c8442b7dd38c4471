"""The rails against the cluster's networks and devices: there, alike, apart from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.api.cluster import Platform, Rail, TrainingClusterSpec
from lockstep.api.objects import Object
from lockstep.plan.checks.finding import Finding, failed, fine, unknown, warning
from lockstep.plan.checks.site import usable_nodes
from lockstep.plan.cluster.facts import ClusterFacts, Sight
from lockstep.plan.cluster.railnetworks import (
    RailNetwork,
    are_isolated,
    is_out_of_reach,
    moved_here,
    out_of_reach,
    read_network,
    same_subnet,
)
from lockstep.plan.waiting.nodes import allocatable, named


def lint_rails(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Nothing where the cluster has no rails: the file alone says that."""
    listing = facts.list("NetworkAttachmentDefinition")
    rails = spec.network.rdma.rails
    if not rails:
        return
    placed = {number: _place(rail.network, facts.namespace) for number, rail in enumerate(rails) if rail.network is not None}
    if placed and listing.sight is Sight.NO_SUCH_KIND:
        yield failed("network.rdma.rails", f"{listing.why_not}: nothing attaches networks to pods", "an administrator installs Multus")
    elif placed and not listing.seen:
        yield unknown("network.rdma.rails", f"whether the networks are there: {listing.why_not}")
    known = {(one.namespace, one.name): one for one in map(read_network, listing.items)}
    networks = {number: known[place] for number, place in placed.items() if place in known}
    for number, rail in _once(rails):
        if number in placed and listing.seen:
            yield from _network(number, placed[number], networks.get(number), rail.resource, spec.platform)
        if rail.network is not None and is_out_of_reach(rail.network, facts.namespace, spec.platform):
            said, fix = out_of_reach(rail.network, facts.namespace), moved_here(rail.network, facts.namespace)
            yield warning(f"network.rdma.rails[{number}].network", said, fix)
        if rail.resource is not None:
            yield from _resource(number, rail.resource, spec, facts)
    yield from _together(spec, networks)
    yield from _mtus(spec, facts, networks)


def _once(rails: Sequence[Rail]) -> Iterator[tuple[int, Rail]]:
    """Each with its number; of rails that are the same, as of one network that attaches several NICs, the first."""
    return ((number, rail) for number, rail in enumerate(rails) if rail not in rails[:number])


def _place(network: str, namespace: str) -> tuple[str, str]:
    other, _, name = network.rpartition("/")
    return other or namespace, name


def _network(
    number: int, place: tuple[str, str], network: RailNetwork | None, resource: str | None, platform: Platform
) -> Iterator[Finding]:
    key = f"network.rdma.rails[{number}].network"
    if network is None:
        elsewhere = "" if platform is Platform.OPENSHIFT else ", or name it as namespace/name"
        fix = f"networks belong to a namespace: an administrator makes one for each rail in yours{elsewhere}"
        yield failed(key, f"there is no NetworkAttachmentDefinition {place[1]} in namespace {place[0]}", fix)
    elif network.problem:
        yield failed(key, f"{place[1]}: {network.problem}", f"kubectl edit network-attachment-definition {place[1]} -n {place[0]}")
    elif network.resource != resource and network.resource is not None:
        said = (
            f"{place[1]} hands out {network.resource} (its annotation), the rail counts {resource or 'nothing'}: no NIC would be attached"
        )
        yield failed(f"network.rdma.rails[{number}].resource", said, f"write resource: {network.resource}")


def _resource(number: int, resource: str, spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    key, seen = f"network.rdma.rails[{number}].resource", facts.list("Node")
    if not seen.seen:
        yield unknown(key, f"whether nodes have {resource}: {seen.why_not}")
        return
    wanted = sum(rail.resource == resource for rail in spec.network.rdma.rails)
    usable = usable_nodes(seen.items, spec)
    without = [str(node["metadata"]["name"]) for node in usable if allocatable(node, resource) < wanted]
    if without and len(without) == len(usable):
        yield failed(key, f"no node that the cluster allows has {wanted} of {resource}", "is the device plugin running, the name right?")
    elif without:
        said = f"{named(without)} {'has' if len(without) == 1 else 'have'} fewer than {wanted} of {resource}: RDMA pods never land there"
        yield warning(key, said, "is the device plugin running there? Else leave such nodes out of nodes.gpu_nodes")
    elif usable:
        yield fine(key, f"every node that the cluster allows has {resource}{_alone(usable, resource)}")


def _alone(nodes: Sequence[Object], resource: str) -> str:
    """One device a node: whoever holds it keeps everybody else away."""
    return ", one each: one RDMA pod a node" if max(allocatable(node, resource) for node in nodes) == 1 else ""


def _together(spec: TrainingClusterSpec, networks: dict[int, RailNetwork]) -> Iterator[Finding]:
    rails = list(dict.fromkeys(networks.values()))
    for one, other in same_subnet(rails):
        said = f"{one.name} and {other.name} share the subnet {one.subnets[0]}: the kernel answers on any of them, and many nodes hang at the first ring"
        yield failed("network.rdma.rails", said, "a subnet of its own for each rail")
    if are_isolated(rails) and spec.network.rdma.cross_nic != 0:
        said = f"the rails are isolated ({', '.join(f'{one.name} {one.subnets[0]}' for one in rails)}) and have no routes to each other"
        value = "left to NCCL" if spec.network.rdma.cross_nic is None else f"cross_nic {spec.network.rdma.cross_nic}"
        yield warning(
            "network.rdma.cross_nic",
            f"{said}; {value}, a ring may cross from one to another and time out",
            "write cross_nic: 0, or add routes",
        )


def _mtus(spec: TrainingClusterSpec, facts: ClusterFacts, networks: dict[int, RailNetwork]) -> Iterator[Finding]:
    found = {network.name: mtu for network in networks.values() if (mtu := _mtu(network, facts)) is not None}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} {mtu}" for name, mtu in found.items())
        yield failed(
            "network.rdma.rails",
            f"the rails' MTUs differ: {told}; the smallest sets the pace, or large packets are dropped",
            "the same on all",
        )
    elif found and spec.network.mtu is not None and set(found.values()) != {spec.network.mtu}:
        said = f"it is {spec.network.mtu}, but the rails have {next(iter(found.values()))}: preflight will refuse every RDMA job"
        yield failed("network.mtu", said, "what the networks have, or raise theirs")


def _mtu(network: RailNetwork, facts: ClusterFacts) -> int | None:
    """The network's own, else its SR-IOV policy's."""
    name = (network.resource or "").rpartition("/")[2]
    policies = [one["spec"] for one in facts.list("SriovNetworkNodePolicy").items if name and one["spec"].get("resourceName") == name]
    return network.mtu or next((int(one["mtu"]) for one in policies if one.get("mtu")), None)


def lint_policies(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """SR-IOV policies that make their NICs without RDMA."""
    for number, rail in _once(spec.network.rdma.rails):
        for policy in facts.list("SriovNetworkNodePolicy").items:
            if (
                rail.resource
                and policy["spec"].get("resourceName") == rail.resource.rpartition("/")[2]
                and not policy["spec"].get("isRdma")
            ):
                said = f"SR-IOV policy {policy['metadata']['name']} makes {rail.resource} without RDMA"
                yield failed(f"network.rdma.rails[{number}].resource", said, "an administrator sets isRdma: true in it")
