"""The rails against the cluster's networks and devices: there, alike, apart from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.api.cluster import Platform, Rail, TrainingClusterSpec
from lockstep.api.objects import Object
from lockstep.plan.checks.site import usable_nodes
from lockstep.plan.cluster.facts import NETWORK, ClusterFacts, Listing, Sight
from lockstep.plan.cluster.finding import Finding, failed, fine, unknown, warning
from lockstep.plan.cluster.railnetworks import (
    RailNetwork,
    are_isolated,
    copy_command,
    is_out_of_reach,
    moved_here,
    out_of_reach,
    read_network,
    same_subnet,
)
from lockstep.plan.waiting.nodes import allocatable, named


def check_rails(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Every finding about the rails; none where the file has none, which the file alone says."""
    yield from check_networks(spec, facts)
    for number, rail in _once(spec.network.rdma.rails):
        if rail.resource is not None:
            yield from _resource(number, rail.resource, spec, facts)
            yield from _policies(number, rail.resource, facts)
    networks = [network for rail in spec.network.rdma.rails if (network := _network_of(rail, facts)) is not None]
    yield from _together(spec, networks)
    yield from _mtus(spec, facts, networks)


def check_networks(spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings about the Multus networks that rails name: are they there, and may pods of the namespace have them."""
    own = facts.list(NETWORK)
    if spec.network.rdma.networks and own.sight is Sight.NO_SUCH_KIND:
        yield failed("network.rdma.rails", f"{own.why_not}: nothing attaches networks to pods", "an administrator installs Multus")
    elif spec.network.rdma.networks and not own.seen:
        yield unknown("network.rdma.rails", f"whether the networks are there: {own.why_not}")
    for number, rail in _once(spec.network.rdma.rails):
        if rail.network is None:
            continue
        namespace, name = _place(rail.network, facts.namespace)
        if facts.networks_of(namespace).seen:
            yield from _network(number, (namespace, name), _network_of(rail, facts), rail.resource, spec.platform, facts)
        elif namespace != facts.namespace and own.seen:
            yield unknown(
                f"network.rdma.rails[{number}].network", f"whether {rail.network} is there: {facts.networks_of(namespace).why_not}"
            )
        if is_out_of_reach(rail.network, facts.namespace, spec.platform):
            message, fix = out_of_reach(rail.network, facts.namespace), moved_here(rail.network, facts.namespace)
            yield warning(f"network.rdma.rails[{number}].network", message, fix)


def _network_of(rail: Rail, facts: ClusterFacts) -> RailNetwork | None:
    """None: the rail names no network, or it was not seen."""
    if rail.network is None:
        return None
    namespace, name = _place(rail.network, facts.namespace)
    item = next((item for item in facts.networks_of(namespace).items if item["metadata"]["name"] == name), None)
    return None if item is None else read_network(item)


def _once(rails: Sequence[Rail]) -> Iterator[tuple[int, Rail]]:
    """Each with its number; of rails that are the same, as of one network that attaches several NICs, the first."""
    return ((number, rail) for number, rail in enumerate(rails) if rail not in rails[:number])


def _place(network: str, namespace: str) -> tuple[str, str]:
    other, _, name = network.rpartition("/")
    return other or namespace, name


def _network(
    number: int, place: tuple[str, str], network: RailNetwork | None, resource: str | None, platform: Platform, facts: ClusterFacts
) -> Iterator[Finding]:
    key, (namespace, name) = f"network.rdma.rails[{number}].network", place
    if network is None:
        everywhere = facts.networks_elsewhere.get("", Listing(NETWORK)).items
        other = next((str(item["metadata"]["namespace"]) for item in everywhere if item["metadata"]["name"] == name), None)
        renamed = "" if platform is Platform.OPENSHIFT else ", or name it as namespace/name"
        fix = f"networks belong to a namespace: an administrator makes one for each rail in yours{renamed}"
        yield failed(
            key,
            f"there is no NetworkAttachmentDefinition {name} in namespace {namespace}",
            fix if other is None else copy_command(name, other, namespace),
        )
    elif network.problem:
        yield failed(key, f"{name}: {network.problem}", f"kubectl edit network-attachment-definition {name} -n {namespace}")
    elif network.resource != resource and network.resource is not None:
        message = f"{name} hands out {network.resource} (its annotation), the rail counts {resource or 'nothing'}: no NIC would be attached"
        yield failed(f"network.rdma.rails[{number}].resource", message, f"write resource: {network.resource}")


def _resource(number: int, resource: str, spec: TrainingClusterSpec, facts: ClusterFacts) -> Iterator[Finding]:
    key, nodes = f"network.rdma.rails[{number}].resource", facts.list("Node")
    if not nodes.seen:
        yield unknown(key, f"whether nodes have {resource}: {nodes.why_not}")
        return
    count = sum(rail.resource == resource for rail in spec.network.rdma.rails)
    usable = usable_nodes(nodes.items, spec)
    without = [str(node["metadata"]["name"]) for node in usable if allocatable(node, resource) < count]
    if without and len(without) == len(usable):
        what = resource if count == 1 else f"{count} of {resource}"
        yield failed(key, f"no node that the cluster allows has {what}", "is the device plugin running, the name right?")
    elif without:
        what = f"no {resource}" if count == 1 else f"fewer than {count} of {resource}"
        message = f"{named(without)} {'has' if len(without) == 1 else 'have'} {what}: RDMA pods never land there"
        yield warning(key, message, "is the device plugin running there? Else leave such nodes out of nodes.gpu_nodes")
    elif usable:
        yield fine(
            key, f"every node that the cluster allows has {resource if count == 1 else f'{count} of {resource}'}{_alone(usable, resource)}"
        )


def _alone(nodes: Sequence[Object], resource: str) -> str:
    """One device a node: whoever holds it keeps everybody else away."""
    return ", one each: one RDMA pod a node" if max(allocatable(node, resource) for node in nodes) == 1 else ""


def _together(spec: TrainingClusterSpec, networks: Sequence[RailNetwork]) -> Iterator[Finding]:
    rails = list(dict.fromkeys(networks))
    for one, other in same_subnet(rails):
        message = f"{one.name} and {other.name} share the subnet {one.subnets[0]}: the kernel answers on any of them, and many nodes hang at the first ring"
        yield failed("network.rdma.rails", message, "a subnet of its own for each rail")
    if are_isolated(rails) and spec.network.rdma.cross_nic != 0:
        message = f"the rails are isolated ({', '.join(f'{one.name} {one.subnets[0]}' for one in rails)}) and have no routes to each other"
        value = "left to NCCL" if spec.network.rdma.cross_nic is None else f"cross_nic {spec.network.rdma.cross_nic}"
        yield warning(
            "network.rdma.cross_nic",
            f"{message}; {value}, a ring may cross from one to another and time out",
            "write cross_nic: 0, or add routes",
        )


def _mtus(spec: TrainingClusterSpec, facts: ClusterFacts, networks: Sequence[RailNetwork]) -> Iterator[Finding]:
    mtus = {network.name: mtu for network in networks if (mtu := _mtu(network, facts)) is not None}
    if len(set(mtus.values())) > 1:
        listed = ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())
        yield failed(
            "network.rdma.rails",
            f"the rails' MTUs differ: {listed}; the smallest sets the pace, or large packets are dropped",
            "the same on all",
        )
    elif mtus and spec.network.mtu is not None and set(mtus.values()) != {spec.network.mtu}:
        message = f"it is {spec.network.mtu}, but the rails have {next(iter(mtus.values()))}: preflight will refuse every RDMA job"
        yield failed("network.mtu", message, "what the networks have, or raise theirs")


def _mtu(network: RailNetwork, facts: ClusterFacts) -> int | None:
    """The network's own, else its SR-IOV policy's."""
    name = (network.resource or "").rpartition("/")[2]
    policies = [one["spec"] for one in facts.list("SriovNetworkNodePolicy").items if name and one["spec"].get("resourceName") == name]
    return network.mtu or next((int(one["mtu"]) for one in policies if one.get("mtu")), None)


def _policies(number: int, resource: str, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings about SR-IOV policies that make their NICs without RDMA."""
    for policy in facts.list("SriovNetworkNodePolicy").items:
        if policy["spec"].get("resourceName") == resource.rpartition("/")[2] and not policy["spec"].get("isRdma"):
            message = f"SR-IOV policy {policy['metadata']['name']} makes {resource} without RDMA"
            yield failed(f"network.rdma.rails[{number}].resource", message, "an administrator sets isRdma: true in it")
