"""The fabric: what a job asked for, what NCCL on each rank says that it took, and what follows from both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep_spec.choices import Choice, DegradedPolicy

_NUMBERED_DRIVERS = frozenset({"mlx4", "mlx5", "hfi1", "cxgb3", "cxgb4"})
"""Their devices have one more number: mlx5_0."""


def are_whole_names(devices: Iterable[str]) -> bool:
    """Return True if all are names of single RDMA devices (mlx5_1, rocep25s0, or mlx5_1:2 with its port), not beginnings of several (mlx5,
    rocep).
    """
    names = [device.partition(":")[0] for device in devices]
    return all(name[-1:].isdigit() and name not in _NUMBERED_DRIVERS for name in names)


@dataclass(frozen=True)
class FabricAsked:
    """The resolved job's fabric, for the agents and the verdict."""

    transport: str
    """RDMA or TCP."""
    hcas: tuple[str, ...] = ()
    """Entries of NCCL_IB_HCA that every node must have, as NCCL writes them; empty: whatever NCCL finds."""
    rails: int = 0
    """NICs that every pod was given; 0: nobody says."""
    gpu_direct: bool = False
    """Stated by the cluster or the job, so its lack is a fault."""
    degraded_policy: DegradedPolicy = DegradedPolicy.WARN
    nccl_debug: str | None = None
    """The cluster's nccl.debug where it stands in the pods' NCCL_DEBUG: how much of NCCL's log is shown. Any other NCCL_DEBUG is a person's
    own.
    """


@dataclass(frozen=True)
class Hca:
    """One port of a NIC that NCCL listed."""

    name: str
    port: int
    link: str
    """IB or RoCE."""
    speed_mbps: int | None = None


@dataclass(frozen=True)
class Traffic:
    """The channels of a rank that go over one network, counted."""

    network: str
    received: int = 0
    received_direct: int = 0
    """Straight into the GPU's memory (GPUDirect RDMA)."""
    sent: int = 0
    sent_direct: int = 0


class FaultKind(Choice):
    """Reach of a fault, which is what it says about its own node: the first kind names a culprit, the last an effect."""

    LOCAL = "Local"  # this node's own NIC, limits or interface
    PATH = "Path"  # between this node and its peer
    EFFECT = "Effect"  # the peer went away


@dataclass(frozen=True)
class NcclFault:
    """A warning of NCCL's about the fabric, in its own words."""

    kind: FaultKind
    text: str
    peer: str = ""
    """The peer's address, without port."""


@dataclass(frozen=True)
class RankFabric:
    """Facts that one rank's NCCL has logged in this attempt."""

    rank: int
    unread: str = ""
    """Reason why there is no log to read; empty: it is read."""
    version: str = ""
    networks: tuple[str, ...] = ()
    """Networks by NCCL's own names, in the order in which communicators took them; `gloo` for CPU ranks."""
    interface: str = ""
    """Interface by which it found the other ranks; for sockets, what carries the data too."""
    address: str = ""
    hcas: tuple[Hca, ...] = ()
    hcas_whole: bool = False
    """The list was read to its end."""
    interfaces: tuple[str, ...] = ()
    """Interfaces of NCCL's socket network."""
    traffic: tuple[Traffic, ...] = ()
    inside: tuple[str, ...] = ()
    """Ways in which it reaches ranks without the network, such as P2P/CUMEM or SHM; P2P/MNNVL crosses nodes."""
    direct_off: str = ""
    """Reason why GPUDirect RDMA is off, as far as NCCL says."""
    direct_by: str = ""
    """DMA-BUF or nvidia-peermem, where NCCL names it; On: a plugin says that it is not DMA-BUF."""
    direct_able: bool = False
    """A NIC can reach GPU memory by one of them."""
    plugin: str = ""
    plugin_failed: str = ""
    provider: str = ""
    """Transport that a plugin says it runs over."""
    no_devices: str = ""
    """Reason why NCCL found no RDMA device."""
    settings: tuple[str, ...] = ()
    """NCCL's variables as it understood them, NAME=value."""
    gids: tuple[int, ...] = ()
    """Entries of the NICs' tables that RoCE connections use."""
    faults: tuple[NcclFault, ...] = ()


class Verified(Choice):
    """Status of the condition FabricVerified."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class FabricReason(Choice):
    """Reason of the condition FabricVerified, in one word."""

    VERIFIED = "Verified"
    FELL_BACK_TO_TCP = "FellBackToTCP"
    HCA_SUBSET = "HCASubset"
    GPU_DIRECT_DISABLED = "GPUDirectDisabled"
    RANKS_DIFFER = "RanksDiffer"
    OTHER_TRANSPORT = "OtherTransport"  # RDMA, though TCP was asked
    PLUGIN_TRANSPORT = "PluginTransport"  # a plugin that does not say over what it runs
    GLOO = "Gloo"
    SINGLE_NODE = "SingleNode"
    NO_LOG = "NoLog"
    WAITING = "Waiting"  # NCCL has not said it yet


@dataclass(frozen=True)
class DifferingRanks:
    """Ranks of one node that are not as asked, or not as the others."""

    node: int
    ranks: str
    """Numbers of the ranks, for example 4–7."""
    why: str


@dataclass(frozen=True)
class FabricReport:
    """The verdict on this attempt's fabric, and what it is."""

    verified: Verified
    reason: FabricReason
    message: str
    transport: str | None = None
    """RDMA, TCP, NVLink, Plugin or gloo; null: not known."""
    network: str | None = None
    """NCCL's name of it."""
    hcas: tuple[str, ...] = ()
    link: str | None = None
    """IB or RoCE, with its speed where NCCL says it."""
    interfaces: tuple[str, ...] = ()
    gpu_direct: str | None = None
    """DMA-BUF, nvidia-peermem, On or Off; null: not known."""
    nccl_version: str | None = None
    ranks_heard: int = 0
    """Ranks whose NCCL has named its network."""
    differing: tuple[DifferingRanks, ...] = ()
    """At most 32."""
