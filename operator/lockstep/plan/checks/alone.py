"""Findings about a cluster file alone: keys that contradict each other, and values that are known to go wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.files.clusterfile import ClusterFile
from lockstep.api.files.clusterkeys import WITHOUT_EFFECT, Calibration
from lockstep.api.hosts import HostsCluster
from lockstep.api.quantity import number
from lockstep.api.shared import FabricMode
from lockstep.plan.cluster.finding import Finding, Outcome, failed, fine, note, warning
from lockstep.plan.render.fabric import RDMA_VARIABLES
from lockstep.plan.render.resolve import describe_default_image, why_unknown
from lockstep_gang.contract.fabric import are_whole_names

IMAGE = "image"
LEAST_ROCE_MTU = 4200
"""RDMA's largest packet is 4096 bytes and its headers; below that a NIC halves it, and halves it again."""
CALIBRATED_PART = 0.98
"""A threshold nearer to what was measured than this refuses nodes for noise."""
_MULTUS = re.compile(r"=?net[1-9][0-9]*")


def lint_alone(file: ClusterFile, operator_image: str, typed: str = "") -> Iterator[Finding]:
    """Findings that need no cluster, in the order of the file.

    `operator_image`: the operator's, as it is deployed or will be. `typed`: the file as a word of a command line, if that isn't the
    cluster's name.
    """
    spec = file.profile.spec
    if file.hosts is not None:
        yield from _hosts(file.hosts)
    yield from _tcp(spec)
    if spec.network.rdma.enabled:
        if file.hosts is None:
            yield from _rails(spec)
        yield from _knobs(spec)
    yield from _nccl(spec)
    if file.hosts is None:
        yield from _pods(spec, operator_image)
        yield from (warning(key, message, "remove it") for key, message in WITHOUT_EFFECT.items() if key in file.lines)
    yield from _threshold(file)
    yield from _calibration(file, typed or file.cluster.name)


def findings_for_mode(findings: Iterable[Finding], mode: FabricMode) -> list[Finding]:
    """Findings that concern jobs that use `mode`: over TCP those of RDMA don't."""
    return [one for one in findings if mode is not FabricMode.TCP or not one.subject.startswith("network.rdma")]


def _hosts(cluster: HostsCluster) -> Iterator[Finding]:
    addresses = {place: ip_address(host.address) for place, host in enumerate(cluster.hosts) if host.address is not None}
    if not addresses and len(cluster.hosts) > 1:
        message = "no host states its address, so the hosts have no way to find each other"
        yield failed("hosts", message, "state address of one host, by number; the others' follow from their routes to it")
    for place, address in addresses.items():
        if address.is_global:
            message = f"{address} is a public address, and NCCL and gloo neither encrypt nor prove who they talk to"
            yield warning(
                f"hosts[{place}].address", message, "an address of a private network, or of a VPN such as WireGuard between the hosts"
            )
    counts = [len(host.gpus) if isinstance(host.gpus, list) else host.gpus for host in cluster.hosts]
    if cluster.least_gpus is not None and len(set(counts)) > 1:
        message = f"the hosts offer {', '.join(map(str, counts))} GPUs: a job takes as many on each, {cluster.least_gpus} if it doesn't say"
        yield warning("hosts", message, "a job with gpusPerNode, or fewer hosts")


def _tcp(spec: TrainingClusterSpec) -> Iterator[Finding]:
    excluded = spec.network.tcp.interface_exclude.removeprefix("^").removeprefix("=").split(",")
    if "lo" not in excluded:
        message = f"{spec.network.tcp.interface_exclude} doesn't leave out lo: NCCL may take the loopback, which no other node reaches"
        yield warning("network.tcp.interface_exclude", message, "write ^lo,docker0")


def _rails(spec: TrainingClusterSpec) -> Iterator[Finding]:
    rdma, gpus = spec.network.rdma, spec.gpus.per_node
    rails, networks = len(rdma.rails), len(rdma.networks)
    counted = rails if networks == rails else 0  # without a network, one resource may stand for all NICs of a node
    if not rails:
        yield warning(
            "network.rdma.rails",
            "RDMA without rails: nothing puts an RDMA NIC into the pods",
            "one entry a NIC, its Multus network, the resource that counts it, or both; lockstep cluster discover finds them",
        )
    devices = rdma.devices if are_whole_names(rdma.devices) else []  # beginnings don't say how many they take
    for key, names, expected in (("devices", devices, counted), ("interfaces", rdma.interfaces, networks)):
        if expected and names and len(names) != expected:
            message = f"{len(names)} {key} but {expected} rails: NCCL uses those that it finds, and the others stand idle"
            yield failed(f"network.rdma.{key}", message, f"one of the {key} a rail; leave {key} out and NCCL takes all")
    if counted and gpus and gpus % counted and counted % gpus:
        message = f"{counted} rails for {gpus} GPUs: some NICs serve more GPUs than others, and the slowest sets the pace"
        yield warning("network.rdma.rails", message, "as many rails as GPUs, or a number that divides them")
    yield from _interfaces(spec)
    without = [number for number, rail in enumerate(rdma.rails) if rail.resource is None]
    if without and len(without) < rails:
        message = f"{rdma.rails[without[0]].network} names no resource, though others do: pods may land where that NIC is taken"
        yield warning(f"network.rdma.rails[{without[0]}]", message, "name the extended resource that counts it")


def _interfaces(spec: TrainingClusterSpec) -> Iterator[Finding]:
    """Multus names what it attaches net1, net2, … in the order of rails; a rail without a network brings no interface."""
    rdma = spec.network.rdma
    networks, names = len(rdma.networks), rdma.interfaces
    multus_names = {f"net{number}" for number in range(1, networks + 1)}
    strange = [name for name in names if name.lstrip("=") not in multus_names]
    if rdma.rails and not networks and (absent := [name for name in names if _MULTUS.fullmatch(name)]):
        message = f"{', '.join(absent)}: Multus makes such interfaces, and no rail has a network"
        yield failed("network.rdma.interfaces", message, "leave it out, or name an interface that every pod has, such as eth0")
    if networks and strange and len(names) == networks:
        message = f"{', '.join(strange)}: Multus names the rails' interfaces net1 to net{networks}"
        yield warning(
            "network.rdma.interfaces",
            message,
            f'write "{",".join(sorted(multus_names))}", unless the networks name their interfaces otherwise',
        )


def _knobs(spec: TrainingClusterSpec) -> Iterator[Finding]:
    rdma, mtu = spec.network.rdma, spec.network.mtu
    if rdma.gid_index is not None and rdma.gid_index % 2 == 0:
        message = f"entry {rdma.gid_index} of a Mellanox NIC's table is RoCE v1, which switches don't route; RoCE v2 has the odd ones"
        yield warning("network.rdma.gid_index", message, "leave it out (NCCL 2.21 and newer finds it), or write 3")
    if rdma.dmabuf is False:
        message = (
            "without DMA-BUF, GPUs and NICs talk directly only where nvidia-peermem is loaded; else every byte goes through the host's"
            " memory"
        )
        yield warning("network.rdma.dmabuf", message, "leave it out: NCCL uses it where it can")
    if rdma.gdr_level in ("0", "LOC"):
        message = f"{rdma.gdr_level} switches GPUDirect RDMA off: every byte goes through the host's memory"
        yield warning("network.rdma.gdr_level", message, "leave it out, or write SYS")
    if mtu is not None and mtu < LEAST_ROCE_MTU:
        yield warning(
            "network.mtu", f"rails with an MTU of {mtu} cut RDMA's packets of 4096 bytes into smaller ones", "9000 on NICs and switches"
        )


def _nccl(spec: TrainingClusterSpec) -> Iterator[Finding]:
    for index, variable in enumerate(spec.nccl.env):
        key = f"nccl.env[{index}]"
        typed = RDMA_VARIABLES.get(variable.name, "")
        if spec.network.rdma.enabled and variable.name == "NCCL_IB_DISABLE" and variable.value == "1":
            yield failed(key, "NCCL_IB_DISABLE is 1, so RDMA is off in every job, RDMA ones included", "remove it: TCP jobs have it anyway")
        elif variable.name == "NCCL_IB_HCA" and variable.value.startswith("^"):
            message = f"NCCL_IB_HCA is {variable.value}: ^ excludes these devices, it is not a pattern"
            yield failed(key, message, "remove it, or list the devices in network.rdma.devices")
        elif typed and getattr(spec.network.rdma, typed) not in (None, []):
            yield warning(key, f"{variable.name} hides network.rdma.{typed}", "keep one of them")


def _pods(spec: TrainingClusterSpec, operator_image: str) -> Iterator[Finding]:
    if spec.image is None:
        message, is_known = describe_default_image(operator_image)
        yield (
            fine(IMAGE, f"{message} (lockstep build trainer makes it)") if is_known else warning(IMAGE, message, "name the trainer's image")
        )
    elif why := why_unknown(spec.image, *spec.pod.env):
        fix = "name that image, or none, and the image of a script in its own spec.image"
        yield note(IMAGE, f"{why}; jobs with spec.training need it", fix)
    memory = spec.resources.limits.memory
    if memory is not None and number(spec.shm_size) >= number(memory):
        message = f"shared memory may take {spec.shm_size}, and counts against the limit of {memory}: a process that fills it is killed"
        yield failed("shm_size", message, "less than resources.limits.memory")


def _threshold(file: ClusterFile) -> Iterator[Finding]:
    """The least bandwidth that preflight accepts, against what was measured."""
    minimum = file.profile.spec.network.minimum_busbw
    measured = _measured(file)
    if minimum is None or measured is None:
        return
    best = max(float(point.busbw) for point in measured.sweep)
    if float(minimum) > best * CALIBRATED_PART:
        message = (
            f"{minimum} GB/s is asked of preflight's all-reduce, but {best:g} GB/s is the best that was measured here on {measured.day}"
        )
        yield failed("network.minimum_busbw", message, f"about {best * 0.8:.3g}: what a healthy fabric always reaches")


def _calibration(file: ClusterFile, typed: str) -> Iterator[Finding]:
    """A finding if nobody has measured the network between the nodes; a single node needs none."""
    if file.profile.spec.gpus.default_nodes > 1 and _measured(file) is None:
        over = "RDMA" if file.profile.spec.network.rdma.enabled else "TCP"
        message = f"never calibrated over {over}: what the network between the nodes gives is not known"
        yield Finding("calibration", Outcome.UNKNOWN, message, f"lockstep cluster calibrate {typed} --save")


def _measured(file: ClusterFile) -> Calibration | None:
    """Calibration over the transport that jobs use unless they say otherwise."""
    transport = "RDMA" if file.profile.spec.network.rdma.enabled else "TCP"
    return next((one for one in file.calibration if one.transport.value == transport), None)
