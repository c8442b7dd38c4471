"""Nodes, storage classes and rails of a cluster against its file: what doctor and lint both look at (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from lockstep.api.cluster import Platform, Rail, TrainingClusterSpec
from lockstep.api.objects import Object
from lockstep.plan.cluster.facts import NETWORK, ClusterFacts, Listing, Sight
from lockstep.plan.cluster.finding import Finding, failed, fine, unknown, warning
from lockstep.plan.cluster.railnetworks import (
    RailNetwork,
    are_isolated,
    copy_command,
    is_out_of_reach,
    moved_here,
    mtu_of,
    out_of_reach,
    read_network,
    same_subnet,
    sriov_policies,
)
from lockstep.plan.cluster.storageclasses import JudgedClass, Shareable, judge_class
from lockstep.plan.discovery.nodes import PRODUCT, gpus_of, host, labels
from lockstep.plan.render.scheduling import usual_tolerations
from lockstep.plan.waiting.nodes import allocatable, lasting_taints, named, shown_taint
from lockstep_spec.choices import StorageMode

ROLE = "node-role.kubernetes.io/"


def usable_nodes(nodes: Iterable[Object], spec: TrainingClusterSpec) -> list[Object]:
    """Nodes that the cluster's names and labels allow, tainted ones too; control planes whose taint it doesn't tolerate only if named, or
    alone.
    """
    named, selector = spec.nodes.gpu_nodes, spec.nodes.selector.items()
    matching = [node for node in nodes if all(labels(node).get(key) == value for key, value in selector)]
    allowed = [node for node in matching if not named or host(node) in named]
    workers = [node for node in allowed if not any(taint["key"].startswith(ROLE) for taint in taints_of(node, spec))]
    return allowed if spec.nodes.gpu_nodes else workers or allowed


def taints_of(node: Object, spec: TrainingClusterSpec) -> list[Object]:
    """Taints that keep off pods which tolerate what the cluster says, and will tomorrow."""
    return lasting_taints(node, usual_tolerations(spec))


def check_nodes(spec: TrainingClusterSpec, facts: ClusterFacts, troubled: Collection[str] = ()) -> Iterator[Finding]:
    """Findings about names that don't exist, taints, too few nodes or GPUs, and nodes that differ. `troubled`: hosts that can't take pods
    for now.
    """
    nodes = facts.list("Node")
    if not nodes.seen:
        yield unknown("nodes.gpu_nodes", f"whether they exist, and what they have: {nodes.why_not}")
        return
    absent = sorted(set(spec.nodes.gpu_nodes) - set(map(host, nodes.items)))
    if absent:
        message = f"{named(absent)} {'is' if len(absent) == 1 else 'are'} not in the cluster"
        yield failed("nodes.gpu_nodes", message, "kubectl get nodes; then edit the list")
    allowed = usable_nodes(nodes.items, spec)
    able = [node for node in allowed if gpus_of(node)[0] >= spec.gpus.per_node and host(node) not in troubled]
    enough = [node for node in able if not taints_of(node, spec)]
    # Taints of other nodes than those that the cluster names are worth a word only where too few nodes are left.
    if spec.nodes.gpu_nodes or len(enough) < spec.gpus.default_nodes:
        yield from _tainted(able, spec)
    if len(enough) < spec.gpus.default_nodes:
        needs = [f"{spec.gpus.per_node} GPUs a node"] if spec.gpus.per_node else []
        needs += ["no taint that keeps them off"] if len(enough) < len(able) else []
        message = (
            f"a job has {spec.gpus.default_nodes} nodes unless it says otherwise; {len(enough)} of the {len(allowed)} nodes that the"
            " cluster allows can take its pods"
        )
        message += f", which need {' and '.join(needs)}" if needs else ""
        message += next((f"; of {host(node)}, {why}" for node in allowed if node not in able and (why := gpus_of(node)[1])), "")
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
        yield _shareable(key, title, chosen, [one.name for one in judged if one.shareable is Shareable.YES], facts.namespace)


def _shareable(key: str, title: str, chosen: JudgedClass, others: list[str], namespace: str) -> Finding:
    if chosen.shareable is Shareable.YES:
        return fine(key, f"{title}: {chosen.why}")
    if chosen.shareable is Shareable.NO:
        fix = f"one of {', '.join(others)}" if others else "storage.mode: volumeClaimTemplates gives every pod volumes of its own"
        return failed(key, f"class {chosen.name} is not ReadWriteMany: {chosen.why}", fix)
    if chosen.shareable is Shareable.DOUBTFUL:
        return warning(
            key, f"{title}: {chosen.why}", f"kubectl describe pvc -n {namespace} says why; or storage.mode: volumeClaimTemplates"
        )
    return unknown(key, f"whether class {chosen.name} can be shared: {chosen.why}")


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
        message = (
            f"{one.name} and {other.name} share the subnet {one.subnets[0]}: the kernel answers on any of them, and many nodes hang at the"
            " first ring"
        )
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
    mtus = {network.name: mtu for network in networks if (mtu := mtu_of(network, network.resource, facts)) is not None}
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


def _policies(number: int, resource: str, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings about SR-IOV policies that make their NICs without RDMA."""
    for policy in sriov_policies(resource, facts):
        if not policy["spec"].get("isRdma"):
            message = f"SR-IOV policy {policy['metadata']['name']} makes {resource} without RDMA"
            yield failed(f"network.rdma.rails[{number}].resource", message, "an administrator sets isRdma: true in it")
