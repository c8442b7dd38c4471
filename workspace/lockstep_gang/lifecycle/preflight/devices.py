"""GPUs and RDMA NICs against the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep_gang.contract.fabric import are_whole_names
from lockstep_gang.contract.preflight import ExpectedRdma, Finding
from lockstep_gang.lifecycle.preflight.findings import Nodes, error, odd, shown_bytes, warning, where
from lockstep_spec.choices import Severity

_SLOW_FIX = "look at that NIC's cable and settings: the slowest one sets the speed of all"


def gpus(nodes: Nodes) -> Iterator[Finding]:
    wanted = nodes.run.gpus_per_node
    few = {node: looked.gpus.count for node, looked in nodes.looked.items() if looked.gpus is not None and looked.gpus.count < wanted}
    for node, count in few.items():
        message = f"{where(nodes.run, node)} has {count} of {wanted} GPUs"
        found = error("gpus", node, message, "look at nvidia-smi and the device plugin there, or lower gpusPerNode")
        yield replace(found, excludes=len(few) < nodes.run.nodes)


def drivers(nodes: Nodes) -> Iterator[Finding]:
    values = {node: looked.gpus.driver for node, looked in nodes.looked.items() if looked.gpus is not None}
    for node, seen, common in odd(values):
        message = f"the NVIDIA driver is {seen or 'not loaded'} on {where(nodes.run, node)} and {common or 'not loaded'} on other nodes"
        yield warning("driver", node, message, "use nodes with one driver version, or update that node")


def locked_memory(nodes: Nodes) -> Iterator[Finding]:
    for node, looked in nodes.looked.items():
        if looked.rdma is not None and looked.rdma.memlock_bytes is not None and not looked.rdma.has_ipc_lock:
            seen = f"may lock {shown_bytes(looked.rdma.memlock_bytes)} of memory and has no CAP_IPC_LOCK"
            fix = "set security.ipc_lock in the cluster file and grant it, or lift the runtime's memlock limit: a NIC can't register memory"
            yield replace(error("lockedMemory", node, f"{where(nodes.run, node)} {seen}", fix), final=True)


def hcas(nodes: Nodes) -> Iterator[Finding]:
    found = [finding for node in nodes.looked for finding in _hcas_of(nodes, node)]
    bad = {finding.node for finding in found if finding.severity is Severity.ERROR}
    yield from (replace(f, excludes=f.severity is Severity.ERROR and len(bad) < nodes.run.nodes) for f in found)


def _hcas_of(nodes: Nodes, node: int) -> Iterator[Finding]:
    rdma, expected = nodes.looked[node].rdma, nodes.run.preflight.rdma if nodes.run.preflight is not None else None
    if rdma is None or expected is None:
        return
    name = where(nodes.run, node)
    ports = [hca for hca in rdma.hcas if _is_asked(hca.device, expected)]
    devices = {hca.device for hca in ports}
    lacking = [stated for stated in expected.devices if not any(_fits(stated, device, expected) for device in devices)]
    here = ", ".join(sorted({hca.device for hca in rdma.hcas})) or "none"
    if lacking:
        fix = "correct network.rdma.devices in the cluster file, or look why the device plugin gave the pod others"
        yield error("hcas", node, f"{name} has no {', '.join(lacking)}; there are {here}", fix)
    elif len(devices) < (expected.count or 1):
        fix = "look at network.rdma.rails and the device plugin on that node"
        yield error("hcas", node, f"{name} has {len(devices)} of {expected.count or 1} RDMA devices ({here})", fix)
    for hca in ports:
        if hca.state != "ACTIVE":
            message = f"port {hca.port} of {hca.device} on {name} is {hca.state or 'in no known state'}, not ACTIVE"
            yield error("hcas", node, message, "look at its cable, its switch port and, on InfiniBand, the subnet manager")
    for device in sorted(devices & set(rdma.unusable)):
        fix = "the pod needs the rail's resource (network.rdma.rails): without it NCCL leaves the NIC out"
        yield error("hcas", node, f"{device} is on {name}, but /dev/infiniband has no device for it", fix)


def _is_asked(device: str, expected: ExpectedRdma) -> bool:
    return not expected.devices or any(_fits(stated, device, expected) for stated in expected.devices)


def _fits(stated: str, device: str, expected: ExpectedRdma) -> bool:
    """As NCCL is told: whole names to the letter, or all of them as beginnings."""
    return device == stated if are_whole_names(expected.devices) else device.startswith(stated)


def rates(nodes: Nodes) -> Iterator[Finding]:
    """Each port against the cluster's rate; then rate and link layer of each device across nodes, where nothing was found yet."""
    slow = list(_slow_ports(nodes))
    yield from (finding for _, finding in slow)
    told = {(finding.node, device) for device, finding in slow}
    seen = {
        node: {h.device: f"{h.link_layer} at {h.rate}" for h in looked.rdma.hcas} for node, looked in nodes.looked.items() if looked.rdma
    }
    for device in sorted({device for ports in seen.values() for device in ports}):
        values = {node: ports[device] for node, ports in seen.items() if device in ports}
        for node, own, common in odd(values):
            if (node, device) not in told:
                message = f"{device} is {own} on {where(nodes.run, node)} and {common} on other nodes"
                yield warning("rates", node, message, _SLOW_FIX)


def _slow_ports(nodes: Nodes) -> Iterator[tuple[str, Finding]]:
    """(device, finding); of one that isn't active, the rate means nothing."""
    expected = nodes.run.preflight.rdma if nodes.run.preflight is not None else None
    if expected is None or expected.rate is None:
        return
    for node, looked in nodes.looked.items():
        for hca in looked.rdma.hcas if looked.rdma is not None else ():
            asked = _is_asked(hca.device, expected)
            rate = _gigabits(hca.rate)
            if asked and hca.state == "ACTIVE" and rate is not None and rate < expected.rate:
                message = f"port {hca.port} of {hca.device} on {where(nodes.run, node)} is at {hca.rate}, the cluster says {expected.rate}"
                yield hca.device, warning("rates", node, message, _SLOW_FIX)


def _gigabits(rate: str) -> float | None:
    """Of sysfs' "400 Gb/sec (4X NDR)"."""
    try:
        return float(rate.partition(" ")[0])
    except ValueError:
        return None


def gids(nodes: Nodes) -> Iterator[Finding]:
    expected = nodes.run.preflight.rdma if nodes.run.preflight is not None else None
    if expected is None or expected.gid_index is None:
        return
    for node, looked in nodes.looked.items():
        for hca in looked.rdma.hcas if looked.rdma is not None else ():
            if not _is_asked(hca.device, expected) or hca.link_layer != "Ethernet":
                continue
            place = f"GID {expected.gid_index} of {hca.device} on {where(nodes.run, node)}"
            fix = "correct network.rdma.gid_index in the cluster file, or leave it out: newer NCCL finds it"
            if not hca.gid:
                yield error("gids", node, f"{place} is empty", fix)
            elif hca.gid_type and hca.gid_type != "RoCE v2":
                yield warning("gids", node, f"{place} is {hca.gid_type}, not RoCE v2", fix)


def mtus(nodes: Nodes) -> Iterator[Finding]:
    expected = nodes.run.preflight.rdma if nodes.run.preflight is not None else None
    for node, looked in nodes.looked.items():
        for interface, mtu in looked.rdma.mtus.items() if looked.rdma is not None else ():
            if expected is not None and expected.mtu is not None and mtu != expected.mtu:
                message = f"{interface} has MTU {mtu} on {where(nodes.run, node)}, the cluster says {expected.mtu}"
                yield warning("mtu", node, message, "set it in the network attachment: one that is too small costs most of the speed")
