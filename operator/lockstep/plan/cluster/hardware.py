"""Nodes as the network program sees them from inside: ports, RDMA devices, and the rails that connect them (pure)."""

from __future__ import annotations

import ipaddress
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep_spec.words import printable_line

TEXT, LIST = 200, 64
"""Most characters of a text and most entries of a list that a node's answer may have: whoever owns the node decides what it prints."""
LOCAL_NAMES = re.compile(r"(lo|docker|br-|virbr|cni|flannel|cilium|cali|kube|podman|lxc|nodelocaldns)", re.IGNORECASE)
"""Interfaces that lead nowhere outside their node."""


@dataclass(frozen=True)
class NicPort:
    """A network interface with an address."""

    name: str
    address: str
    prefix: int
    mtu: int | None = None
    gbs: float | None = None
    """Line rate in Gb/s; None where the driver states none."""
    wireless: bool = False
    hca: str = ""
    """RDMA device of the same port; '' where it has none."""


@dataclass(frozen=True)
class HcaPort:
    """A port of an RDMA device that is up."""

    device: str
    port: int
    gbs: float | None = None


@dataclass(frozen=True)
class NodeHardware:
    """One node's answer."""

    host: str = ""
    cores: float | None = None
    ports: tuple[NicPort, ...] = ()
    hcas: tuple[HcaPort, ...] = ()
    tools: tuple[str, ...] = ()


def read_hardware(answer: Mapping[str, Any]) -> NodeHardware:
    """Read a node's answer. Raises ValueError for what isn't one."""
    try:
        return NodeHardware(
            host=_text(answer["host"]),
            cores=_number(answer.get("cores")),
            ports=tuple(_nic(port) for port in _list(answer["ports"])),
            hcas=tuple(_hca(hca) for hca in _list(answer["hcas"])),
            tools=tuple(map(_text, _list(answer["tools"]))),
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a node's answer: {error}") from None


def _nic(port: Mapping[str, Any]) -> NicPort:
    address, prefix = str(ipaddress.ip_address(port["address"])), int(port["prefix"])
    ipaddress.ip_network(f"{address}/{prefix}", strict=False)  # else rails could not be told apart
    mtu = None if port["mtu"] is None else int(port["mtu"])
    return NicPort(_text(port["name"]), address, prefix, mtu, _number(port["gbs"]), bool(port["wireless"]), _text(port["hca"]))


def _hca(hca: Mapping[str, Any]) -> HcaPort:
    return HcaPort(_text(hca["device"]), int(hca["port"]), _number(hca["gbs"]))


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("a list is missing")
    return value[:LIST]


def _text(value: object) -> str:
    return printable_line(str(value)[:TEXT])


def _number(value: Any) -> float | None:
    number = None if value is None else float(value)
    return number if number is None or math.isfinite(number) else None


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
                subnets[str(ipaddress.ip_network(f"{port.address}/{port.prefix}", strict=False))].setdefault(node, port)
    rails += [_rail(ports, subnet) for subnet, ports in sorted(subnets.items()) if len(ports) > 1]
    return rails


def _names(ports: Mapping[int, Sequence[NicPort]]) -> list[str]:
    return list(dict.fromkeys(port.name for node in sorted(ports) for port in ports[node]))


def _rail(ports: Mapping[int, NicPort], name: str = "") -> MeasuredRail:
    names = {port.name for port in ports.values()}
    ends = {node: RailEnd(port.name, port.address, port.gbs, port.mtu, port.hca, wireless=port.wireless) for node, port in ports.items()}
    return MeasuredRail(names.pop() if len(names) == 1 else name or " / ".join(sorted(names)), ends)


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
