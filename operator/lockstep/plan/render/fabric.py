"""Transport between nodes, NCCL's variables, and the networks and devices that RDMA needs in a pod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

from lockstep.api.cluster import Network, Rdma, Tcp, TrainingClusterSpec
from lockstep.api.job import Fabric, TrainingJobSpec
from lockstep.api.shared import FabricMode, NcclVariable, Variable
from lockstep.plan.layers import Layer, Layered, Notice, written
from lockstep_gang.contract.fabric import FabricAsked, are_whole_names

Variables = dict[str, Layered[str]]

GPU_RESOURCE = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"
"""AWS's adapters: ibverbs' of their own kind, which NCCL reaches by libfabric (its plugin aws-ofi-nccl), so that NCCL_IB_* mean nothing."""
RDMA_VARIABLES = {
    "NCCL_IB_HCA": "devices",
    "NCCL_SOCKET_IFNAME": "interfaces",
    "NCCL_IB_GID_INDEX": "gid_index",
    "NCCL_NET_GDR_LEVEL": "gdr_level",
    "NCCL_CROSS_NIC": "cross_nic",
    "NCCL_IB_TIMEOUT": "ib_timeout",
    "NCCL_MIN_NCHANNELS": "min_nchannels",
    "NCCL_DMABUF_ENABLE": "dmabuf",
}
"""Field of network.rdma that sets each variable, where the field is stated."""


class Transport(StrEnum):
    """Transport that the pods are built for. What NCCL really used is read from its own log."""

    RDMA = "RDMA"
    TCP = "TCP"


def choose_transport(fabric: Fabric, network: Network, gpus_per_node: int) -> Layered[Transport]:
    """The job's mode, else the cluster's, else (Auto) RDMA where the cluster has it and there are GPUs to use it.

    CPU ranks talk over gloo, which has no RDMA: Auto leaves the NICs to jobs that can use them.
    """
    for mode, layer in ((fabric.mode, Layer.JOB), (network.mode, Layer.CLUSTER)):
        if mode is not FabricMode.AUTO:
            return Layered(Transport(mode.value), layer)
    enabled = network.rdma.enabled and gpus_per_node > 0
    return Layered(Transport.RDMA if enabled else Transport.TCP, written(network.rdma, "enabled", Layer.CLUSTER).layer)


def fabric_refusals(transport: Transport, network: Network, profile_name: str) -> list[Notice]:
    """Refusals of what the fabric can't do. RDMA is refused where the cluster has none: a job that was to take minutes would silently take
    hours.
    """
    if transport is Transport.RDMA and not network.rdma.enabled:
        message = (
            f"fabric.mode is RDMA, but the cluster {profile_name} has no RDMA (network.rdma.enabled is false):"
            " use Auto or TCP, or another cluster"
        )
        return [Notice("RDMAUnavailable", message)]
    # Some resources can't count NICs: GPUs are counted by gpusPerNode, and `requests.` is what a quota's keys begin with.
    return [
        Notice(
            "RailResourceInvalid",
            f"network.rdma.rails[{number}].resource of the cluster {profile_name} is {rail.resource}, which can't count NICs:"
            " name the extended resource of the rail's device plugin",
        )
        for number, rail in enumerate(network.rdma.rails if transport is Transport.RDMA else ())
        if rail.resource is not None and (rail.resource == GPU_RESOURCE or rail.resource.startswith("requests."))
    ]


def fabric_warnings(transport: Transport, network: Network, profile_name: str, gpus_per_node: int) -> list[Notice]:
    """Warnings about what is allowed and probably not meant."""
    if transport is not Transport.RDMA:
        return []
    warnings = []
    if not network.rdma.rails:
        message = (
            f"RDMA is used, but the cluster {profile_name} names no network.rdma.rails:"
            " pods get no RDMA networks or devices from Lockstep, and NCCL takes what it finds"
        )
        warnings.append(Notice("NoRails", message))
    stated = [name for name, field in RDMA_VARIABLES.items() if "_IB_" in name and getattr(network.rdma, field) not in (None, [])]
    if has_efa(network.rdma) and stated:
        message = (
            f"the cluster {profile_name} has EFA, which NCCL reaches by libfabric: {', '.join(stated)} would mean nothing, so pods don't"
            " get it"
        )
        warnings.append(Notice("VariableIgnored", message))
    if gpus_per_node == 0:
        warnings.append(
            Notice(
                "RDMAWithoutGPUs",
                "RDMA is requested, but gpusPerNode is 0: CPU ranks use gloo, which has no RDMA and sends over sockets on the first rail",
            )
        )
    return warnings


def nccl_environment(env: list[Variable], profile: TrainingClusterSpec, transport: Layered[Transport], gpus_per_node: int) -> Variables:
    """NCCL variables of every pod, by name, with the layer that set each. CPU ranks use gloo, which gets the first rail where RDMA is
    requested.

    Only what the job or the cluster states: an unset knob is NCCL's to choose, and its defaults age better than copied ones.
    The job's `env` wins over the cluster's nccl.env, and that over the cluster's typed knobs.
    """
    if gpus_per_node == 0:
        interfaces = profile.network.rdma.interfaces if transport.value is Transport.RDMA else []
        return {"GLOO_SOCKET_IFNAME": Layered(interfaces[0], Layer.CLUSTER)} if interfaces else {}
    network = profile.network
    typed = _tcp_knobs(network.tcp, transport.layer) if transport.value is Transport.TCP else _rdma_knobs(network.rdma)
    if profile.nccl.debug is not None:
        typed["NCCL_DEBUG"] = Layered(profile.nccl.debug.value, Layer.CLUSTER)
    typed |= {variable.name: Layered(variable.value, Layer.CLUSTER) for variable in profile.nccl.env}
    of_job = {one.name: Layered(one.value, Layer.JOB) for one in env if one.name.startswith("NCCL_") and one.value is not None}
    return dict(sorted((typed | of_job).items()))


def _tcp_knobs(tcp: Tcp, chosen_by: Layer) -> Variables:
    knobs = {
        "NCCL_IB_DISABLE": Layered("1", chosen_by),
        "NCCL_SOCKET_IFNAME": Layered(tcp.interface_exclude, written(tcp, "interface_exclude", Layer.CLUSTER).layer),
    }
    if tcp.p2p_level is not None:
        knobs["NCCL_P2P_LEVEL"] = Layered(tcp.p2p_level, Layer.CLUSTER)
    return knobs


def _rdma_knobs(rdma: Rdma) -> Variables:
    values = {name: getattr(rdma, field) for name, field in RDMA_VARIABLES.items()}
    knobs = {name: Layered(_nccl_text(value), Layer.CLUSTER) for name, value in values.items() if value not in (None, [])}
    if are_whole_names(rdma.devices) and rdma.devices:
        # NCCL takes a name for a beginning, mlx5_1 for mlx5_10 too, unless `=` stands before the list.
        knobs["NCCL_IB_HCA"] = Layered("=" + _nccl_text(rdma.devices), Layer.CLUSTER)
    if has_efa(rdma):
        # libfabric would take its tcp provider without a word where EFA's fails.
        return {name: value for name, value in knobs.items() if "_IB_" not in name} | {"FI_PROVIDER": Layered("efa", Layer.CLUSTER)}
    return knobs


def has_efa(rdma: Rdma) -> bool:
    return any(rail.resource == EFA for rail in rdma.rails)


def _nccl_text(value: list[str] | bool | int | str) -> str:
    return ",".join(value) if isinstance(value, list) else str(int(value) if isinstance(value, bool) else value)


def fabric_asked(spec: TrainingJobSpec, profile: TrainingClusterSpec, transport: Transport, variables: Variables) -> FabricAsked:
    """Fabric that NCCL's log is compared with: what the variables that reach the ranks ask for, whoever set them."""
    values = {variable.name: variable.value for variable in profile.pod.env}
    values |= {name: layered.value for name, layered in variables.items()}
    rdma = transport is Transport.RDMA
    hcas = _expected_hcas(values.get("NCCL_IB_HCA", "")) if rdma else ()
    return FabricAsked(
        transport=transport.value,
        hcas=hcas,
        rails=len(profile.network.rdma.rails) if rdma and "NCCL_IB_HCA" not in values else 0,
        gpu_direct=rdma and _asks_for_gpu_direct(values),
        degraded_policy=spec.fabric.degraded_policy,
        nccl_debug=_shown_of_nccl(spec, profile),
    )


def _expected_hcas(value: str) -> tuple[str, ...]:
    """Devices that NCCL_IB_HCA requires; none for an exclusion (^). `=` before the list means exact names."""
    exact = "=" if value.startswith("=") else ""
    return () if value.startswith("^") else tuple(exact + name for name in value.removeprefix("=").split(",") if name)


def _asks_for_gpu_direct(values: Mapping[str, str]) -> bool:
    """A level above LOC, or DMA-BUF switched on, is written down only where GPU and NIC are to talk directly."""
    level = values.get("NCCL_NET_GDR_LEVEL")
    return level not in ("0", "LOC") if level is not None else values.get("NCCL_DMABUF_ENABLE") == "1"


def _shown_of_nccl(spec: TrainingJobSpec, profile: TrainingClusterSpec) -> str | None:
    """nccl.debug, unless a variable of somebody's own takes its place."""
    own: list[NcclVariable | Variable] = [*profile.nccl.env, *spec.env]
    if profile.nccl.debug is None or any(variable.name == "NCCL_DEBUG" for variable in own):
        return None
    return profile.nccl.debug.value


def rail_networks(rdma: Rdma) -> str:
    """The value of Multus' annotation: one attachment a rail that has a network, in the cluster's order, so net1 is the first
    everywhere.
    """
    return ",".join(rdma.networks)


def rail_resources(rdma: Rdma) -> dict[str, str]:
    """The NICs a pod asks for, by extended resource."""
    counts = Counter(rail.resource for rail in rdma.rails if rail.resource is not None)
    return {resource: str(count) for resource, count in counts.items()}
