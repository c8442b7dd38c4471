"""Nodes as the network program sees them from inside: ports, RDMA devices, and the rails that connect them (pure)."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from lockstep_spec.codec import FINITE, from_json, no_longer
from lockstep_spec.words import cleaned

FEW = no_longer(64)
"""Bounds of a list in a node's answer: whoever owns the node decides what it prints."""
Text = Annotated[str, no_longer(200)]
Rate = Annotated[float, FINITE]
LOCAL_NAMES = re.compile(r"(lo|docker|br-|virbr|cni|flannel|cilium|cali|kube|podman|lxc|nodelocaldns)", re.IGNORECASE)
"""Interfaces that lead nowhere outside their node."""


@dataclass(frozen=True)
class NicPort:
    """A network interface with an address."""

    name: Text
    address: str
    prefix: int
    mtu: int | None = None
    gbs: Rate | None = None
    """Line rate in Gb/s; None where the driver states none."""
    wireless: bool = False
    hca: Text = ""
    """RDMA device of the same port; '' where it has none."""

    def __post_init__(self) -> None:
        _ = self.network  # else rails could not be told apart

    @property
    def end(self) -> RailEnd:
        """The port as an end of a rail."""
        return RailEnd(self.name, self.address, self.gbs, self.mtu, self.hca, wireless=self.wireless)

    @property
    def network(self) -> str:
        """Network that the port is on. Raises ValueError for an address that is none."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))


@dataclass(frozen=True)
class HcaPort:
    """A port of an RDMA device that is up."""

    device: Text
    port: int
    gbs: Rate | None = None


@dataclass(frozen=True)
class NodeHardware:
    """One node's answer."""

    host: Text
    cores: Rate | None
    ports: Annotated[tuple[NicPort, ...], FEW]
    hcas: Annotated[tuple[HcaPort, ...], FEW]
    tools: Annotated[tuple[Text, ...], FEW]


def read_hardware(answer: Mapping[str, Any]) -> NodeHardware:
    """Read a node's answer. Raises ValueError for what isn't one."""
    return from_json(NodeHardware, cleaned(answer), "its answer")


@dataclass(frozen=True)
class RailEnd:
    """One node's port on a rail."""

    interface: str
    address: str
    """Address that the others connect to."""
    gbs: float | None = None
    mtu: int | None = None
    hca: str = ""
    hca_port: int = 1
    wireless: bool = False


@dataclass(frozen=True)
class MeasuredRail:
    """A network that connects nodes, each by one port."""

    name: str
    ends: Mapping[int, RailEnd]

    def line_gbs(self, sender: int, receiver: int, stated: float | None = None) -> float | None:
        """Line rate between two nodes: that of the slower port. `stated`: by a person, where ports state none."""
        rates = [self.ends[node].gbs for node in (sender, receiver)]
        known = [rate for rate in rates if rate is not None]
        return min(known) if len(known) == 2 else stated


def socket_rails(nodes: Mapping[int, NodeHardware], addresses: Mapping[int, str] | None = None) -> list[MeasuredRail]:
    """Rails for sockets: interfaces that every node has under one name, then what lies in one subnet.

    `addresses`: where the nodes reach each other, as a person has stated it: this network comes first, whatever its interfaces are called.
    """
    left = {node: [port for port in facts.ports if not LOCAL_NAMES.match(port.name)] for node, facts in nodes.items()}
    rails = []
    if addresses is not None:
        stated = {node: next((port for port in facts.ports if port.address == addresses.get(node)), None) for node, facts in nodes.items()}
        if all(stated.values()):
            rails.append(_rail({node: port for node, port in stated.items() if port is not None}))
            left = {node: [port for port in ports if port != stated[node]] for node, ports in left.items()}
    common = [name for name in _names(left) if all(any(port.name == name for port in ports) for ports in left.values())]
    for name in common:
        ports = {node: next(port for port in ports if port.name == name) for node, ports in left.items()}
        if len({port.address for port in ports.values()}) == len(ports):  # (a bridge of containers has the same one everywhere)
            rails.append(_rail(ports))
    subnets: dict[str, dict[int, NicPort]] = defaultdict(dict)
    for node, others in left.items():
        for port in others:
            if port.name not in common:
                subnets[port.network].setdefault(node, port)
    rails += [_rail(ports, subnet) for subnet, ports in sorted(subnets.items()) if len(ports) > 1]
    return rails


def _names(ports: Mapping[int, Sequence[NicPort]]) -> list[str]:
    return list(dict.fromkeys(port.name for node in sorted(ports) for port in ports[node]))


def _rail(ports: Mapping[int, NicPort], name: str = "") -> MeasuredRail:
    names = {port.name for port in ports.values()}
    title = names.pop() if len(names) == 1 else name or " / ".join(sorted(names))
    return MeasuredRail(title, {node: port.end for node, port in ports.items()})


def rdma_rails(nodes: Mapping[int, NodeHardware], sockets: Sequence[MeasuredRail]) -> list[MeasuredRail]:
    """Rails for RDMA: those of sockets whose ports have an RDMA device; else, where InfiniBand has no addresses, the nodes' devices by
    their order.
    """
    rails = [rail for rail in sockets if all(end.hca for end in rail.ends.values())]
    if rails:
        return [MeasuredRail(rail.name, {node: _with_hca(nodes[node], end) for node, end in rail.ends.items()}) for rail in rails]
    if not sockets or not nodes:
        return []
    count = min(len(facts.hcas) for facts in nodes.values())
    way = sockets[0].ends  # only over which both sides of a measurement agree
    return [
        MeasuredRail(
            " / ".join(dict.fromkeys(facts.hcas[number].device for facts in nodes.values())),
            {
                node: RailEnd(way[node].interface, way[node].address, hca.gbs, None, hca.device, hca.port)
                for node, facts in nodes.items()
                for hca in [facts.hcas[number]]
            },
        )
        for number in range(count)
        if way.keys() == nodes.keys()
    ]


def _with_hca(facts: NodeHardware, end: RailEnd) -> RailEnd:
    hca = next((hca for hca in facts.hcas if hca.device == end.hca), None)
    return end if hca is None else RailEnd(end.interface, end.address, hca.gbs or end.gbs, end.mtu, hca.device, hca.port)
