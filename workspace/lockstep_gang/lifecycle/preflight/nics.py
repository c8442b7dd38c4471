"""The checks of RDMA NICs (pure): what NCCL would take of those that a node may open, beside what the cluster's file says and what other
nodes have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from lockstep_gang.contract.fabric import are_whole_names
from lockstep_gang.contract.preflight import ExpectedRdma, Finding, HcaFacts, is_link_local
from lockstep_gang.lifecycle.preflight.nodes import NodeAnswers, Told, findings_of, odd
from lockstep_machine.rdma import LOCKED_BYTES_ENOUGH, LOCKED_BYTES_FAILING, gigabits
from lockstep_spec.choices import Severity
from lockstep_spec.words import binary_size, clauses, listed, number_of

_SLOW_FIX = "look at that NIC's cable and settings: the slowest one sets the speed of all"


def locked_memory(nodes: NodeAnswers) -> Iterator[Finding]:
    message, fix = "{} may lock <> of memory and has no CAP_IPC_LOCK", nodes.words.locked_memory
    seen = [(node, looked.rdma) for node, looked in nodes.looked.items() if looked.rdma is not None and not looked.rdma.has_ipc_lock]
    limits = [(node, rdma.memlock_bytes) for node, rdma in seen if rdma.memlock_bytes is not None]
    failing = [(node, binary_size(limit), message, fix) for node, limit in limits if limit <= LOCKED_BYTES_FAILING]
    doubtful = [(node, binary_size(limit), message, fix) for node, limit in limits if LOCKED_BYTES_FAILING < limit < LOCKED_BYTES_ENOUGH]
    yield from (replace(finding, final=True) for finding in findings_of(nodes, "lockedMemory", Severity.ERROR, failing))
    yield from findings_of(nodes, "lockedMemory", Severity.WARNING, doubtful)


@dataclass(frozen=True)
class _Devices:
    """RDMA devices of a node that the cluster's file names (or all): their ports, and the devices that can't be opened."""

    node: int
    ports: Sequence[HcaFacts]
    closed: Collection[str]

    @property
    def openable(self) -> list[str]:
        return sorted({hca.device for hca in self.ports} - set(self.closed))

    @property
    def active(self) -> list[HcaFacts]:
        """Ports that NCCL takes."""
        return [hca for hca in self.ports if hca.state == "ACTIVE" and hca.device not in self.closed]

    @property
    def usable(self) -> list[str]:
        return sorted({hca.device for hca in self.active})

    @property
    def inactive(self) -> list[HcaFacts]:
        """A port of each device that can be opened and has no active one."""
        return list({hca.device: hca for hca in self.ports if hca.device in set(self.openable) - set(self.usable)}.values())


def _devices(nodes: NodeAnswers) -> list[_Devices]:
    asked = nodes.rdma.devices or ("",)  # which every name begins with
    seen = [(node, looked.rdma) for node, looked in nodes.looked.items() if looked.rdma is not None]
    ports = {node: [hca for hca in rdma.hcas if any(_fits(one, hca, nodes.rdma) for one in asked)] for node, rdma in seen}
    return [_Devices(node, ports[node], rdma.unusable) for node, rdma in seen]


_PORT_FIX = "look at its cable, its switch port and, on InfiniBand, the subnet manager"
_KINDS_FIX = "name in network.rdma.devices those that ranks shall use: NCCL may take slow ones, such as a storage network's, as well"
_GUID_FIX = "give the virtual function a GUID (SR-IOV operator, or ip link set … vf … node_guid): no subnet manager serves it without"
_ADDRESS_FIX = "give its interface an address: link-local ones reach no other subnet"
_GID_FIX = "correct network.rdma.gid_index in the cluster file, or leave it out: newer NCCL finds it"


def hcas(nodes: NodeAnswers) -> Iterator[Finding]:
    """Find what NCCL can't do without (too few devices that can be opened, a stated one that can't or is down, no active port), and what is
    odd.
    """
    found = _devices(nodes)
    lacking = [told for devices in found for told in _lacking(nodes, devices)]
    yield from findings_of(nodes, "hcas", Severity.ERROR, lacking, excluding=True)
    fit = [devices for devices in found if devices.node not in {node for node, *_ in lacking}]
    most = max((len(devices.usable) for devices in fit), default=0)
    strange = [told for devices in fit for told in (*_fewer(nodes, devices, most), *_mixed(nodes, devices))]
    open_ports = {(devices.node, hca) for devices in found for hca in devices.ports if hca.device not in devices.closed}
    nameless = {(node, hca.device) for node, hca in open_ports if hca.no_guid and hca.link_layer != "Unknown"}
    strange += [(node, device, "no GUID: <> on {}", _GUID_FIX) for node, device in sorted(nameless)]
    yield from findings_of(nodes, "hcas", Severity.WARNING, strange)


def _lacking(nodes: NodeAnswers, devices: _Devices) -> Iterator[Told]:
    """Tell the first reason why RDMA can't work on a node as the cluster's file says."""
    node, rdma, expected, count, words = devices.node, nodes.looked[devices.node].rdma, nodes.rdma, nodes.rdma.count or 1, nodes.words
    here = listed(sorted({hca.device for hca in rdma.hcas}) if rdma is not None else []) or "none"
    is_strict = bool(expected.devices) and are_whole_names(expected.devices)
    absent = [stated for stated in expected.devices if not any(_fits(stated, hca, expected) for hca in devices.ports)]
    closed = sorted({hca.device for hca in devices.ports if hca.device in devices.closed})
    if absent:
        yield from ((node, name, f"no <> on {{}}; there are {here}", words.hcas) for name in absent)
    elif closed and (is_strict or not devices.openable):
        yield from ((node, name, "<> on {}: /dev/infiniband has no device for it", words.hca_unusable) for name in closed)
    elif len(devices.openable) < count:
        can = listed(devices.openable) or here
        yield node, can, f"{len(devices.openable)} of {count} RDMA devices can be opened on {{}} (<>)", words.hca_count
    elif devices.inactive and (is_strict or not devices.active):
        yield from ((node, _state(hca), "<> on {}, not ACTIVE", _PORT_FIX) for hca in devices.inactive)


def _state(hca: HcaFacts) -> str:
    return f"port {hca.port} of {hca.device} is {hca.state or 'in no known state'}"


def _fewer(nodes: NodeAnswers, devices: _Devices, most: int) -> Iterator[Told]:
    """Tell what a node lacks beside its rails, or beside the node with the most."""
    usable, rails = len(devices.usable), nodes.rdma.count or 1
    if usable < rails:
        yield from (
            (devices.node, _state(hca), f"{usable} of {rails} rails can be used on {{}}: <>", _PORT_FIX) for hca in devices.inactive
        )
    elif usable < most:
        message = f"{number_of(usable, 'usable RDMA device')} on {{}} (<>), and {most} on other nodes"
        yield devices.node, listed(devices.usable), message, nodes.words.hca_count


def _mixed(nodes: NodeAnswers, devices: _Devices) -> Iterator[Told]:
    kinds: dict[str, list[str]] = {}
    for hca in devices.active:
        kinds.setdefault(f"{hca.link_layer} at {hca.rate.partition(' (')[0]}", []).append(hca.device)
    if len(kinds) > 1 and not nodes.rdma.devices:
        all_kinds = clauses([f"{kind}: {listed(names)}" for kind, names in sorted(kinds.items())])
        yield devices.node, all_kinds, "RDMA devices of several kinds on {} (<>)", _KINDS_FIX


def _fits(stated: str, hca: HcaFacts, expected: ExpectedRdma) -> bool:
    """Return True if NCCL would take the port: whole names match to the letter, else all are beginnings."""
    name, _, port = stated.partition(":")
    fits = hca.device == name if name and are_whole_names(expected.devices) else hca.device.startswith(name)
    return fits and port in ("", str(hca.port))


def rates(nodes: NodeAnswers) -> Iterator[Finding]:
    """Find ports that are slower than the cluster says, then devices whose rate or link layer differs between nodes, where nothing was
    found yet.
    """
    stated, ports = nodes.rdma.rate, [(devices.node, hca) for devices in _devices(nodes) for hca in devices.active]
    slow = [(node, hca) for node, hca in ports if stated is not None and (gigabits(hca.rate) or stated) < stated]
    less = f"<> on {{}} at %s, the cluster says {stated}"
    told = [(node, f"port {hca.port} of {hca.device}", less % hca.rate, _SLOW_FIX) for node, hca in slow]
    for device in sorted({hca.device for _, hca in ports}):
        kinds = {node: f"{hca.link_layer} at {hca.rate}" for node, hca in ports if hca.device == device}
        unlike = [one for one in odd(kinds) if not any((one[0], device) == (node, hca.device) for node, hca in slow)]
        told += [(node, device, f"<> on {{}}: {own}; on other nodes {common}", _SLOW_FIX) for node, own, common in unlike]
    yield from findings_of(nodes, "rates", Severity.WARNING, told)


def gids(nodes: NodeAnswers) -> Iterator[Finding]:
    ports = [(devices.node, hca) for devices in _devices(nodes) for hca in devices.active if hca.link_layer == "Ethernet"]
    for severity in (Severity.ERROR, Severity.WARNING):
        told = [(node, hca.device, *problem[1:]) for node, hca in ports if (problem := _gid_problem(nodes, hca)) and problem[0] is severity]
        yield from findings_of(nodes, "gids", severity, told)


def _gid_problem(nodes: NodeAnswers, hca: HcaFacts) -> tuple[Severity, str, str] | None:
    """Problem of a RoCE port's address; `<>` stands for the device."""
    index = nodes.rdma.gid_index
    if index is None:
        alone = hca.routed_gids == ()
        return (Severity.WARNING, "no address but link-local ones, which no router forwards: <> on {}", _ADDRESS_FIX) if alone else None
    place = f"GID {index} of <> on {{}}"
    if not hca.gid:
        return Severity.ERROR, f"{place} is empty", _GID_FIX
    if hca.gid_type and hca.gid_type != "RoCE v2":
        return Severity.WARNING, f"{place} is {hca.gid_type}, not RoCE v2", _GID_FIX
    if is_link_local(hca.gid):
        better = f"; {hca.routed_gids[0]} has an address" if hca.routed_gids else ""
        return Severity.WARNING, f"{place} is link-local, which no router forwards{better}", _GID_FIX
    return None


def unused_rdma(nodes: NodeAnswers) -> Iterator[Finding]:
    """Find nodes that all have what RDMA needs while ranks are to use TCP."""
    able = {devices.node: devices.usable for devices in _devices(nodes) if devices.active}
    told = [
        (node, name, "<> on {} could carry RDMA, and ranks use TCP", nodes.words.rdma) for node, names in able.items() for name in names
    ]
    yield from findings_of(nodes, "unusedRdma", Severity.WARNING, told if len(able) == nodes.run.nodes else ())


def mtus(nodes: NodeAnswers) -> Iterator[Finding]:
    stated, rdma = nodes.rdma.mtu, [(node, looked.rdma) for node, looked in nodes.looked.items() if looked.rdma is not None]
    seen = [(node, *item) for node, facts in rdma for item in facts.mtus.items()]
    told = [(node, name, f"<> on {{}}: MTU {mtu}, the cluster says {stated}", nodes.words.mtu) for node, name, mtu in seen if mtu != stated]
    yield from findings_of(nodes, "mtu", Severity.WARNING, told if stated is not None else ())


def net_plugins(nodes: NodeAnswers) -> Iterator[Finding]:
    """Find images in which NCCL can't reach EFA, and would take sockets."""
    fix = "an image with libfabric and aws-ofi-nccl, as AWS' deep learning containers are"
    message = "no network plugin of NCCL's (<>) on {}: over EFA NCCL would take sockets"
    told = [(node, "libnccl-net.so", message, fix) for node, looked in nodes.looked.items() if looked.net_plugin is False]
    yield from findings_of(nodes, "netPlugin", Severity.WARNING, told)
