"""The checks of a preflight (pure): names, reachability, clocks, files, shared memory, devices and software, each over what all nodes found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lockstep_gang.contract.fabric import are_whole_names
from lockstep_gang.contract.preflight import ExpectedRdma, Finding, Kind, PathFact, VolumeFacts
from lockstep_gang.lifecycle.preflight.findings import NodeAnswers, error, odd, warning
from lockstep_spec.choices import Severity, StorageMode
from lockstep_spec.words import binary_size

SKEW_SECONDS = 1.0


def names(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, looked in nodes.looked.items():
        for address, why in looked.unresolved.items():
            fix = "look at the cluster's DNS and the job's headless Service"
            yield error("names", node, f"{nodes.name(node)} can't resolve {address} ({why})", fix)


def peers(nodes: NodeAnswers) -> Iterator[Finding]:
    closed = [node for node, looked in nodes.looked.items() if not looked.port]
    for node in closed:
        yield error("peers", node, f"{nodes.name(node)} could not open a port", "look at its agent's log")
    for node, met in nodes.met.items():
        for other, why in met.unreachable.items():
            message = f"{nodes.name(node)} can't reach {nodes.name(int(other))}: {why}"
            yield error(
                "peers", node, message, "pods of one job must reach each other on all ports: look at network policies and firewalls"
            )


def clocks(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, skew in nodes.skews.items():
        if abs(skew) > SKEW_SECONDS:
            message = f"the clock of {nodes.name(node)} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} node 0's"
            yield warning("clock", node, message, "let NTP or chrony set the node's clock: logs and tokens go by it")


FREE_BYTES_FLOOR = 256 * 1024**2
"""Free space below which nothing can be recorded any more."""
CHECKPOINT_BYTES_UNKNOWN = 1024**3
"""Room that should be there while no checkpoint tells what one needs."""
_SHM_SHARE = 0.95  # a tmpfs is rounded to pages


def paths(nodes: NodeAnswers) -> Iterator[Finding]:
    expected = nodes.run.preflight.paths if nodes.run.preflight is not None else ()
    for node, looked in nodes.looked.items():
        facts = {fact.path: fact for fact in looked.paths}
        for item in expected:
            fact = facts.get(item.path, PathFact(item.path, error="it was not looked at"))
            kinds = [item.kind, Kind.FOLDER] if item.or_folder else [item.kind]
            seen = _path_problem(fact, [kind.value for kind in kinds])
            if seen and "paths" not in looked.unfinished:
                message = f"{item.field}: {seen} {item.path} on {nodes.name(node)}"
                fix = "put it there, or correct the path" if not fact.error else "look at the volume and at the file's rights"
                yield replace(error("paths", node, message, fix), final=not fact.error)


def _path_problem(fact: PathFact, kinds: Sequence[str]) -> str:
    if fact.error:
        return f"{fact.error}:"
    return "" if fact.found in kinds else f"there is no {' or '.join(kinds).lower()}"


def writable(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, volume in _volumes(nodes):
        if volume.error:
            message = f"{nodes.name(node)} can't write in {nodes.run.run_dir}: {volume.error}"
            yield error("writable", node, message, "look at the volume: is it full, read-only, or another user's?")


def shared(nodes: NodeAnswers) -> Iterator[Finding]:
    claimed = nodes.run.storage is StorageMode.SHARED
    if nodes.looked[0].volume is None or nodes.looked[0].volume.error:
        return  # then nobody can see what node 0 wrote
    for node, met in nodes.met.items():
        if met.sees_marker is None or met.sees_marker is claimed:
            continue
        run_dir, name = nodes.run.run_dir, nodes.name(node)
        if claimed:
            message = f"{name} does not see what node 0 writes to {run_dir}, though storage is Shared"
            fix = "use a ReadWriteMany claim that all nodes mount, or set storage.mode to PerPod"
        else:
            message = f"{name} sees what node 0 writes to {run_dir}, though storage is PerPod"
            fix = "give every pod a volume of its own, or set storage.mode to Shared"
        yield replace(error("shared", node, message, fix), final=True)


def space(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, volume in _volumes(nodes):
        if volume.error or (node and nodes.run.storage is StorageMode.SHARED):
            continue  # one volume, told once
        free, needed = volume.free_bytes, volume.checkpoint_bytes or CHECKPOINT_BYTES_UNKNOWN
        message = f"{binary_size(free)} are free in {nodes.run.run_dir} on {nodes.name(node)}"
        if free < FREE_BYTES_FLOOR:
            yield error(
                "space", node, f"{message}, at least {binary_size(FREE_BYTES_FLOOR)} are needed", "delete what is no longer needed there"
            )
        elif free < needed:
            known = "the newest checkpoint has" if volume.checkpoint_bytes else "a checkpoint may need"
            yield warning(
                "space", node, f"{message}, {known} {binary_size(needed)}", "make room, or saves will fail and the job run on without"
            )


def _volumes(nodes: NodeAnswers) -> Iterator[tuple[int, VolumeFacts]]:
    return ((node, looked.volume) for node, looked in nodes.looked.items() if looked.volume is not None)


def shared_memory(nodes: NodeAnswers) -> Iterator[Finding]:
    asked = nodes.run.preflight.shm_bytes if nodes.run.preflight is not None else None
    for node, looked in nodes.looked.items():
        if asked is not None and looked.shm_bytes is not None and looked.shm_bytes < asked * _SHM_SHARE:
            message = f"shared memory (/dev/shm) has {binary_size(looked.shm_bytes)} on {nodes.name(node)}, the cluster asks for {binary_size(asked)}"
            yield warning(
                "sharedMemory", node, message, "raise the pods' memory limit or the cluster's shm_size: NCCL and data loaders end by SIGBUS"
            )


_SLOW_FIX = "look at that NIC's cable and settings: the slowest one sets the speed of all"


def gpus(nodes: NodeAnswers) -> Iterator[Finding]:
    wanted = nodes.run.gpus_per_node
    few = {node: looked.gpus.count for node, looked in nodes.looked.items() if looked.gpus is not None and looked.gpus.count < wanted}
    for node, count in few.items():
        message = f"{nodes.name(node)} has {count} of {wanted} GPUs"
        found = error("gpus", node, message, "look at nvidia-smi and the device plugin there, or lower gpusPerNode")
        yield replace(found, excludes=len(few) < nodes.run.nodes)


def drivers(nodes: NodeAnswers) -> Iterator[Finding]:
    values = {node: looked.gpus.driver for node, looked in nodes.looked.items() if looked.gpus is not None}
    for node, seen, common in odd(values):
        message = f"the NVIDIA driver is {seen or 'not loaded'} on {nodes.name(node)} and {common or 'not loaded'} on other nodes"
        yield warning("driver", node, message, "use nodes with one driver version, or update that node")


def locked_memory(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, looked in nodes.looked.items():
        if looked.rdma is not None and looked.rdma.memlock_bytes is not None and not looked.rdma.has_ipc_lock:
            seen = f"may lock {binary_size(looked.rdma.memlock_bytes)} of memory and has no CAP_IPC_LOCK"
            fix = "set security.ipc_lock in the cluster file and grant it, or lift the runtime's memlock limit: a NIC can't register memory"
            yield replace(error("lockedMemory", node, f"{nodes.name(node)} {seen}", fix), final=True)


def hcas(nodes: NodeAnswers) -> Iterator[Finding]:
    found = [finding for node in nodes.looked for finding in _hcas_of(nodes, node)]
    bad = {finding.node for finding in found if finding.severity is Severity.ERROR}
    yield from (replace(f, excludes=f.severity is Severity.ERROR and len(bad) < nodes.run.nodes) for f in found)


def _hcas_of(nodes: NodeAnswers, node: int) -> Iterator[Finding]:
    rdma, expected = nodes.looked[node].rdma, nodes.run.preflight.rdma if nodes.run.preflight is not None else None
    if rdma is None or expected is None:
        return
    name = nodes.name(node)
    ports = [hca for hca in rdma.hcas if _is_asked(hca.device, expected)]
    devices = {hca.device for hca in ports}
    lacking = [stated for stated in expected.devices if not any(_fits(stated, device, expected) for device in devices)]
    here = ", ".join(sorted({hca.device for hca in rdma.hcas})) or "none"
    if lacking:
        fix = "correct network.rdma.devices in the cluster file, or find out why the device plugin gave the pod others"
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
    """Return True if NCCL would take the device: whole names match to the letter, else all are beginnings."""
    return device == stated if are_whole_names(expected.devices) else device.startswith(stated)


def rates(nodes: NodeAnswers) -> Iterator[Finding]:
    """Findings about each port against the cluster's rate, then about each device's rate and link layer across nodes, where nothing was found yet."""
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
                message = f"{device} is {own} on {nodes.name(node)} and {common} on other nodes"
                yield warning("rates", node, message, _SLOW_FIX)


def _slow_ports(nodes: NodeAnswers) -> Iterator[tuple[str, Finding]]:
    """(device, finding); of one that isn't active, the rate means nothing."""
    expected = nodes.run.preflight.rdma if nodes.run.preflight is not None else None
    if expected is None or expected.rate is None:
        return
    for node, looked in nodes.looked.items():
        for hca in looked.rdma.hcas if looked.rdma is not None else ():
            asked = _is_asked(hca.device, expected)
            rate = _gigabits(hca.rate)
            if asked and hca.state == "ACTIVE" and rate is not None and rate < expected.rate:
                message = f"port {hca.port} of {hca.device} on {nodes.name(node)} is at {hca.rate}, the cluster says {expected.rate}"
                yield hca.device, warning("rates", node, message, _SLOW_FIX)


def _gigabits(rate: str) -> float | None:
    """Gb/s in sysfs' "400 Gb/sec (4X NDR)"."""
    try:
        return float(rate.partition(" ")[0])
    except ValueError:
        return None


def gids(nodes: NodeAnswers) -> Iterator[Finding]:
    expected = nodes.run.preflight.rdma if nodes.run.preflight is not None else None
    if expected is None or expected.gid_index is None:
        return
    for node, looked in nodes.looked.items():
        for hca in looked.rdma.hcas if looked.rdma is not None else ():
            if not _is_asked(hca.device, expected) or hca.link_layer != "Ethernet":
                continue
            place = f"GID {expected.gid_index} of {hca.device} on {nodes.name(node)}"
            fix = "correct network.rdma.gid_index in the cluster file, or leave it out: newer NCCL finds it"
            if not hca.gid:
                yield error("gids", node, f"{place} is empty", fix)
            elif hca.gid_type and hca.gid_type != "RoCE v2":
                yield warning("gids", node, f"{place} is {hca.gid_type}, not RoCE v2", fix)


def mtus(nodes: NodeAnswers) -> Iterator[Finding]:
    expected = nodes.run.preflight.rdma if nodes.run.preflight is not None else None
    for node, looked in nodes.looked.items():
        for interface, mtu in looked.rdma.mtus.items() if looked.rdma is not None else ():
            if expected is not None and expected.mtu is not None and mtu != expected.mtu:
                message = f"{interface} has MTU {mtu} on {nodes.name(node)}, the cluster says {expected.mtu}"
                yield warning("mtu", node, message, "set it in the network attachment: one that is too small costs most of the speed")


_SAME = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "deepspeed")
"""Libraries whose messages to each other change between versions."""


def python(nodes: NodeAnswers) -> Iterator[Finding]:
    values = {node: looked.versions.get("python", "") for node, looked in nodes.looked.items() if looked.versions}
    for node, seen, common in odd(values):
        message = f"Python is {seen} on {nodes.name(node)} and {common} on other nodes"
        yield warning("python", node, message, "use one image on all nodes")


def libraries(nodes: NodeAnswers) -> Iterator[Finding]:
    names = sorted({name for looked in nodes.looked.values() for name in looked.versions if name != "python"})
    for name in names:
        values = {node: looked.versions.get(name, "") for node, looked in nodes.looked.items() if looked.versions}
        for node, seen, common in odd(values):
            message = f"{name} is {seen or 'not installed'} on {nodes.name(node)} and {common or 'not installed'} on other nodes"
            fix = "use one image on all nodes, and install nothing in pods"
            yield (
                replace(error("libraries", node, message, fix), final=True) if name in _SAME else warning("libraries", node, message, fix)
            )


def environment(nodes: NodeAnswers) -> Iterator[Finding]:
    names = sorted({name for looked in nodes.looked.values() for name in looked.environment})
    for name in names:
        values = {n: looked.environment.get(name, "") for n, looked in nodes.looked.items() if "environment" not in looked.unfinished}
        for node, seen, common in odd(values):
            message = f"{name} is {_quoted(seen)} on {nodes.name(node)} and {_quoted(common)} on other nodes"
            yield warning("environment", node, message, "set it in the job or in the cluster, for all nodes")


def _quoted(value: str) -> str:
    return repr(value[:100]) if value else "not set"
