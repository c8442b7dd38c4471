"""The network part of a TrainingCluster: how nodes are connected, and what NCCL is told about it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import DNS_LABEL_PATTERN, DNS_SUBDOMAIN, QUALIFIED_PART, Decimal, Model, Rule, list_map
from lockstep.api.shared import FabricMode, NcclVariable

INTERFACE_PATTERN = r"^[A-Za-z0-9_.:@-]+$"
InterfaceName = Annotated[str, Field(pattern=INTERFACE_PATTERN, max_length=32)]
EXCLUSION_PATTERN = r"^\^[A-Za-z0-9_.:,@-]+$"
RESOURCE_PATTERN = rf"^{DNS_SUBDOMAIN}/{QUALIFIED_PART}$"
ResourceName = Annotated[str, Field(pattern=RESOURCE_PATTERN, max_length=317)]
NETWORK_PATTERN = rf"^({DNS_LABEL_PATTERN[1:-1]}/)?{DNS_SUBDOMAIN}$"
NetworkName = Annotated[str, Field(pattern=NETWORK_PATTERN, max_length=317)]
GDR_PATTERN = r"^([0-5]|LOC|PIX|PXB|PHB|SYS)$"
P2P_PATTERN = r"^([0-5]|LOC|NVL|PIX|PXB|PHB|SYS)$"


class Memlock(StrEnum):
    """Way to lock RDMA memory: by CAP_IPC_LOCK as UID 0, or because the runtime already lifted the limit."""

    CAPABILITY = "Capability"
    UNLIMITED = "Unlimited"


class Rail(Model):
    """One RDMA NIC of a node: the Multus network that attaches it, the resource that counts it, or both."""

    network: NetworkName | None = None
    """The NetworkAttachmentDefinition, for example eno5np0-network, or namespace/name; it may stand in several rails. Left out: the resource alone brings the NIC."""
    resource: ResourceName | None = None
    """The extended resource that counts the NIC, for example openshift.io/eno5np0rdma. Left out: the network needs none."""

    RULES = (
        Rule(
            "has(self.network) || has(self.resource)",
            "must have a network, a resource or both",
            lambda rail: rail.network is not None or rail.resource is not None,
            field="network",
        ),
    )


class Rdma(Model):
    """The RDMA fabric. Only what is stated is set: an unset knob is NCCL's to choose."""

    enabled: bool = False
    """true: nodes have RDMA NICs, and fabric.mode Auto takes them."""
    devices: Annotated[list[InterfaceName], Field(max_length=32)] = []
    """NCCL_IB_HCA. Whole names (mlx5_1) stand for themselves (`=mlx5_1`), beginnings (mlx5) for all that begin so. Empty: NCCL uses every device it sees."""
    interfaces: Annotated[list[InterfaceName], Field(max_length=32)] = []
    """NCCL_SOCKET_IFNAME while RDMA is used: the rails' interfaces in the pod."""
    rate: Annotated[int | None, Field(ge=1, le=100_000)] = None
    """Gb/s that every port must have, as ibstat shows it; preflight warns of a slower one."""
    gid_index: Annotated[int | None, Field(ge=0, le=255)] = None
    """NCCL_IB_GID_INDEX."""
    gdr_level: Annotated[str | None, Field(pattern=GDR_PATTERN, max_length=3)] = None
    """NCCL_NET_GDR_LEVEL: up to which distance a GPU and a NIC talk without the host's memory."""
    cross_nic: Annotated[int | None, Field(ge=0, le=2)] = None
    """NCCL_CROSS_NIC: whether a ring may go in by one NIC and out by another."""
    ib_timeout: Annotated[int | None, Field(ge=1, le=31)] = None
    """NCCL_IB_TIMEOUT: 4.096 µs × 2^timeout."""
    min_nchannels: Annotated[int | None, Field(ge=1, le=64)] = None
    """NCCL_MIN_NCHANNELS."""
    rails: Annotated[list[Rail], Field(max_length=32)] = []
    """Networks and resources of every pod of an RDMA job."""
    memlock: Memlock = Memlock.CAPABILITY
    """Way in which pods lock memory for the NIC. Capability also needs security.ipcLock."""
    dmabuf: bool | None = None
    """NCCL_DMABUF_ENABLE."""

    @property
    def networks(self) -> list[str]:
        """The rails' networks, in order: Multus makes an interface (net1, net2, …) for each. The same may be there several times."""
        return [rail.network for rail in self.rails if rail.network is not None]

    RULES = (
        Rule(
            "!has(self.rails) || size(self.rails) == 0 || self.enabled",
            "rails may not be set when enabled is false",
            lambda r: r.enabled or not r.rails,
            field="rails",
        ),
    )


class Tcp(Model):
    """The socket network."""

    interface_exclude: Annotated[str, Field(pattern=EXCLUSION_PATTERN, max_length=256)] = "^lo,docker0"
    """NCCL_SOCKET_IFNAME as an exclusion."""
    p2p_level: Annotated[str | None, Field(alias="p2pLevel", pattern=P2P_PATTERN, max_length=3)] = None
    """NCCL_P2P_LEVEL: up to which distance GPUs of a node talk directly."""


class Network(Model):
    """Network between the nodes."""

    mode: FabricMode = FabricMode.AUTO
    """Fabric of a job with fabric.mode Auto here; set by deploy-cluster MODE=."""
    rdma: Rdma = Rdma()
    tcp: Tcp = Tcp()
    mtu: Annotated[int | None, Field(ge=576, le=65535)] = None
    """MTU that the rails must have; given to ranks as LOCKSTEP_RAIL_MTU."""
    minimum_busbw: Decimal | None = None
    """Least bus bandwidth of preflight's all-reduce, in decimal GB/s (10^9 bytes a second), as nccl-tests and `lockstep preflight` give it."""

    RULES = (
        Rule(
            "!(self.mode == 'RDMA' && !self.rdma.enabled)",
            "mode may not be RDMA when rdma.enabled is false",
            lambda n: not (n.mode is FabricMode.RDMA and not n.rdma.enabled),
            field="mode",
        ),
    )


class NcclDebug(StrEnum):
    """Amount that NCCL logs."""

    WARN = "WARN"
    INFO = "INFO"
    TRACE = "TRACE"
    VERSION = "VERSION"


class Nccl(Model):
    """NCCL's own settings."""

    debug: NcclDebug | None = None
    """Amount of NCCL's log that is shown in the job's, and NCCL_DEBUG in `kubectl exec`. Ranks log INFO to a file that Lockstep reads; its warnings are always shown."""
    env: Annotated[list[NcclVariable], Field(max_length=64, json_schema_extra=list_map())] = []
    """More NCCL variables of every pod. A job's own win."""
