"""Multus networks as rails: what a NetworkAttachmentDefinition says of its plugin, MTU, addresses and routes (pure)."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.api.cluster import Platform
from lockstep.api.objects import Object
from lockstep.plan.cluster.facts import ClusterFacts

EVERYBODYS = frozenset({"default", "openshift-multus", "openshift-sriov-network-operator", "openshift-cnv"})
"""Namespaces whose networks every pod may have where Multus keeps namespaces apart: globalNamespaces, as OpenShift's network operator
writes it.
"""
RESOURCE_ANNOTATION = "k8s.v1.cni.cncf.io/resourceName"
_RDMA_WORDS = re.compile(r"(rdma|roce|infiniband|hca|mlnxnics|nvidia\.com/hostdev|/resib)|(?:^|[^a-z])(ib|ipoib|efa)(?![a-z])")
"""`ib` only as a word of its own: it is part of too many names. The network operator's own: hostdev, and resibp12s0 for a port ibp12s0."""
_SETTING_UP = frozenset({"tuning", "rdma", "sbr", "vrf", "portmap", "bandwidth", "firewall", "route-override"})
"""Plugins of a chain that change an interface which another one brings."""
SHARING = frozenset({"macvlan", "ipvlan", "ipoib"})
"""Plugins that give pods an interface over the host's own, whose RDMA device all of them share."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class RailNetwork:
    """One NetworkAttachmentDefinition."""

    namespace: str
    name: str
    plugin: str = ""
    """The one of its chain that brings the interface."""
    interface: str = ""
    """The host's own that it moves or stands over, if it names it."""
    is_rdma: bool = False
    """Its chain moves the RDMA device with the interface."""
    resource: str | None = None
    """The extended resource that its annotation names."""
    mtu: int | None = None
    subnets: tuple[Network, ...] = ()
    """Empty: its addresses come from elsewhere (dhcp, a pool)."""
    has_routes: bool = False
    """Its configuration has routes, so that other rails' subnets may be reached."""
    problem: str = ""
    """Reason that its configuration can't be read."""

    def of(self, namespace: str) -> str:
        """Name of the network in a job of `namespace`."""
        return self.name if self.namespace == namespace else f"{self.namespace}/{self.name}"


def read_network(item: Object) -> RailNetwork:
    metadata = item["metadata"]
    namespace, name = str(metadata.get("namespace", "")), str(metadata["name"])
    resource = (metadata.get("annotations") or {}).get(RESOURCE_ANNOTATION)
    try:
        config = json.loads((item.get("spec") or {}).get("config") or "{}")
        chain = config.get("plugins", [config])
        device = next((plugin for plugin in chain if plugin.get("type") not in _SETTING_UP), chain[0])
        ipams = [plugin.get("ipam") or {} for plugin in chain]
        mtus = [int(plugin["mtu"]) for plugin in chain if plugin.get("mtu")]
        return RailNetwork(
            namespace,
            name,
            plugin=str(device.get("type", "")),
            interface=str(device.get("master") or device.get("device") or ""),
            is_rdma=any(plugin.get("type") == "rdma" for plugin in chain),
            resource=resource,
            mtu=mtus[-1] if mtus else None,
            subnets=tuple(dict.fromkeys(subnet for ipam in ipams for subnet in _networks(ipam))),
            has_routes=any(ipam.get("routes") for ipam in ipams) or any(plugin.get("addroutes") for plugin in chain),
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return RailNetwork(namespace, name, resource=resource, problem=f"its spec.config can't be read: {error}")


def sriov_policies(resource: str, facts: ClusterFacts) -> list[Object]:
    """SR-IOV policies that make the NICs of this extended resource."""
    name = resource.rpartition("/")[2]
    return [item for item in facts.list("SriovNetworkNodePolicy").items if name and item["spec"].get("resourceName") == name]


def mtu_of(network: RailNetwork | None, resource: str | None, facts: ClusterFacts) -> int | None:
    """The network's own MTU, else its SR-IOV policy's."""
    by_policy = (policy["spec"].get("mtu") for policy in sriov_policies(resource or "", facts))
    return (network and network.mtu) or next((int(mtu) for mtu in by_policy if mtu), None)


def _networks(ipam: Any) -> Iterator[Network]:
    """host-local (subnet, ranges), whereabouts (range, ipRanges) and static (addresses)."""
    ranges = [inner for outer in ipam.get("ranges", []) for inner in (outer if isinstance(outer, list) else [outer])]
    texts = [ipam.get("subnet"), ipam.get("range"), *(inner.get("subnet") for inner in ranges)]
    texts += [inner.get("range") for inner in ipam.get("ipRanges", [])]
    texts += [inner.get("address") for inner in ipam.get("addresses", [])]
    for text in filter(None, texts):
        yield ipaddress.ip_network(str(text).rpartition("-")[2], strict=False)  # whereabouts: first-last/length


def is_out_of_reach(network: str, namespace: str, platform: Platform) -> bool:
    """Return True if pods of `namespace` can't have `network`, as a rail names it: OpenShift's Multus keeps namespaces apart."""
    other = network.rpartition("/")[0]
    return platform is Platform.OPENSHIFT and bool(other) and other != namespace and other not in EVERYBODYS


def out_of_reach(network: str, namespace: str) -> str:
    """Sentence about a network that is out of reach, and its consequence."""
    message = (
        f"network {network} is another namespace's, and OpenShift's Multus (namespace isolation) gives it to no pod of namespace"
        f" {namespace}"
    )
    return f"{message}: pods stay in ContainerCreating"


def copy_command(network: str, elsewhere: str, namespace: str) -> str:
    """Command by which an administrator makes the network of another namespace once more in this one."""
    own = "sed -E '/^  (namespace|uid|resourceVersion|creationTimestamp|generation):/d'"
    return f"kubectl get net-attach-def {network} -n {elsewhere} -o yaml | {own} | kubectl apply -n {namespace} -f -"


def moved_here(network: str, namespace: str) -> str:
    """Remedy for a rail that is out of reach."""
    other, _, name = network.rpartition("/")
    return f"an administrator: {copy_command(name, other, namespace)}; then write network: {name}"


def speaks_of_rdma(*texts: str) -> bool:
    """Return True if one of the names is about RDMA."""
    return any(_RDMA_WORDS.search(text.lower()) for text in texts)


def stem(name: str) -> str:
    """Part of the name that a network and its resource have in common: eno5np0-network and openshift.io/eno5np0rdma are both eno5np0."""
    last = name.rpartition("/")[2].lower()
    return re.sub(r"[-_.]?(network|net|rdma|rail|sriov|vf)$", "", re.sub(r"[-_.]?(network|net|rdma|sriov|vf)$", "", last))


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts eno5 before eno10."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part)


def same_subnet(networks: Sequence[RailNetwork]) -> list[tuple[RailNetwork, RailNetwork]]:
    """Pairs of rails whose subnets overlap: the kernel answers on any of them, and packets leave by the wrong NIC."""
    return [
        (one, other)
        for number, one in enumerate(networks)
        for other in networks[number + 1 :]
        if any(a.version == b.version and a.overlaps(b) for a in one.subnets for b in other.subnets)
    ]


def are_isolated(networks: Iterable[RailNetwork]) -> bool:
    """Several rails, each in a subnet of its own, and none has a route: a NIC reaches its own rail's NICs only."""
    addressed = [network for network in networks if network.subnets]
    return len(addressed) > 1 and not same_subnet(addressed) and not any(network.has_routes for network in addressed)
