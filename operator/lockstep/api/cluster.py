"""TrainingCluster: a cluster, written down once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from lockstep.api.model import (
    DNS_LABEL_PATTERN,
    DNS_SUBDOMAIN,
    QUALIFIED_PART,
    AbsolutePath,
    Decimal,
    DnsLabel,
    DnsName,
    Image,
    LabelKey,
    Model,
    Quantity,
    Rule,
    list_map,
    list_set,
)
from lockstep.api.names import API_VERSION, DATASETS_CLAIM, WORKSPACE_CLAIM
from lockstep.api.podtemplate import Toleration
from lockstep.api.quantity import number
from lockstep.api.shared import FabricMode, Labels, NcclVariable, NodeNames, PlainVariable, values_fit
from lockstep_spec.choices import StorageMode

INTERFACE_PATTERN = r"^[A-Za-z0-9_.:@-]+$"
InterfaceName = Annotated[str, Field(pattern=INTERFACE_PATTERN, max_length=32)]
EXCLUSION_PATTERN = r"^\^[A-Za-z0-9_.:,@-]+$"
RESOURCE_PATTERN = rf"^{DNS_SUBDOMAIN}/{QUALIFIED_PART}$"
ResourceName = Annotated[str, Field(pattern=RESOURCE_PATTERN, max_length=317)]
NETWORK_PATTERN = rf"^({DNS_LABEL_PATTERN[1:-1]}/)?{DNS_SUBDOMAIN}$"
NetworkName = Annotated[str, Field(pattern=NETWORK_PATTERN, max_length=317)]
GDR_PATTERN = r"^([0-5]|LOC|PIX|PXB|PHB|SYS)$"
P2P_PATTERN = r"^([0-5]|LOC|NVL|PIX|PXB|PHB|SYS)$"


class Platform(StrEnum):
    """OpenShift assigns user ids by SCC; plain Kubernetes needs them stated."""

    OPENSHIFT = "OpenShift"
    KUBERNETES = "Kubernetes"


class Nodes(Model):
    """Nodes that may be used."""

    gpu_nodes: Annotated[NodeNames, Field(json_schema_extra=list_set())] = []
    """Host names that may be used; empty: any."""
    selector: Labels = {}
    """Labels that a node must have."""
    rack_label: LabelKey | None = None
    """The node label that names the rack: pods of a job are preferably placed in one rack."""


def _claims_are_shared(storage: ClusterStorage) -> bool:
    own_names = (storage.workspace_claim, storage.datasets_claim) != (WORKSPACE_CLAIM, DATASETS_CLAIM)
    return not (own_names and storage.mode is StorageMode.PER_POD)


class ClusterStorage(Model):
    """The cluster's storage."""

    mode: StorageMode = StorageMode.SHARED
    """Default of jobs that don't say."""
    class_rwx: DnsName | None = None
    """The ReadWriteMany class of the Shared claims. Left out: the cluster's default class."""
    class_rwo: DnsName | None = None
    """The ReadWriteOnce class of the PerPod claims. Left out: the cluster's default class."""
    workspace_size: Quantity = "100Gi"
    """Size of /workspace: of the one claim when Shared, of every pod's when PerPod."""
    datasets_size: Quantity = "500Gi"
    """Size of /datasets: of the one claim when Shared, of every pod's when PerPod."""
    workspace_claim: DnsName = WORKSPACE_CLAIM
    """Name of the namespace's shared claim for /workspace."""
    datasets_claim: DnsName = DATASETS_CLAIM
    """Name of the namespace's shared claim for /datasets."""

    RULES = (
        Rule(
            f"self.mode != 'PerPod' || (self.workspaceClaim == '{WORKSPACE_CLAIM}' && self.datasetsClaim == '{DATASETS_CLAIM}')",
            "workspaceClaim and datasetsClaim may not be set when mode is PerPod: every pod has claims of its own",
            _claims_are_shared,
            field="mode",
        ),
    )


class Memlock(StrEnum):
    """Way to lock RDMA memory: by CAP_IPC_LOCK as UID 0, or because the runtime already lifted the limit."""

    CAPABILITY = "Capability"
    UNLIMITED = "Unlimited"


class Rail(Model):
    """One RDMA NIC of a node: the Multus network that attaches it, the resource that counts it, or both."""

    network: NetworkName | None = None
    """The NetworkAttachmentDefinition, for example eno5np0-network, or namespace/name; it may stand in several rails. Left out: the
    resource alone brings the NIC.
    """
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
    """NCCL_IB_HCA. Whole names (mlx5_1) stand for themselves (`=mlx5_1`), beginnings (mlx5) for all that begin so. Empty: NCCL uses every
    device it sees.
    """
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
    """Fabric of a job with fabric.mode Auto here; set by lockstep deploy --mode."""
    rdma: Rdma = Rdma()
    tcp: Tcp = Tcp()
    mtu: Annotated[int | None, Field(ge=576, le=65535)] = None
    """MTU that the rails must have; given to ranks as LOCKSTEP_RAIL_MTU."""
    minimum_busbw: Decimal | None = None
    """Least bus bandwidth of preflight's all-reduce, in decimal GB/s (10^9 bytes a second), as nccl-tests and `lockstep preflight` give it.
    """

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
    """Amount of NCCL's log that is shown in the job's, and NCCL_DEBUG in `kubectl exec`. Ranks log INFO to a file that Lockstep reads; its
    warnings are always shown.
    """
    env: Annotated[list[NcclVariable], Field(max_length=64, json_schema_extra=list_map())] = []
    """More NCCL variables of every pod. A job's own win."""


class Security(Model):
    """Rights of the pods."""

    service_account: DnsName = "ml-dev-sa"
    """The pods' ServiceAccount. It is made by lockstep deploy; jobs never make one."""
    ipc_lock: bool = False
    """Add CAP_IPC_LOCK to RDMA pods, so that they can lock memory for the NIC."""


class Gpus(Model):
    """The GPUs of a node."""

    per_node: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs that a pod takes when its job doesn't say; 0: ranks run on the CPU."""
    type: Annotated[str | None, Field(max_length=128)] = None
    """Name that people know them by, for example NVIDIA H100 80GB HBM3; shown by `lockstep cluster list`."""
    default_nodes: Annotated[int, Field(ge=1, le=1024)] = 2
    """Nodes of a job that doesn't say."""


class Amounts(Model):
    """CPU and memory."""

    cpu: Quantity | None = None
    """CPU cores, for example 32 or 500m."""
    memory: Quantity | None = None
    """Memory, for example 128Gi."""


def _limits_hold(name: str) -> Rule:
    """limits.<name> is at least requests.<name>: the API server refuses such a pod, but only when the job runs."""

    def holds(resources: Resources) -> bool:
        low, high = getattr(resources.requests, name), getattr(resources.limits, name)
        return low is None or high is None or number(high) >= number(low)

    both_set = f"has(self.requests) && has(self.limits) && has(self.requests.{name}) && has(self.limits.{name})"
    return Rule(
        f"!({both_set}) || quantity(self.limits.{name}).compareTo(quantity(self.requests.{name})) >= 0",
        f"limits.{name} must be greater than or equal to requests.{name}",
        holds,
        field=f"limits.{name}",
    )


class Resources(Model):
    """Requests and limits of every pod."""

    requests: Amounts = Amounts()
    """Amounts that a node must have free."""
    limits: Amounts = Amounts()
    """Amounts that a pod may use at most. Left out: no limit."""

    RULES = (_limits_hold("cpu"), _limits_hold("memory"))


class ClusterVolume(Model):
    """A claim that every pod of a job mounts read-only, for example a Python environment shared by all."""

    name: DnsLabel
    """The volume's name in the pod."""
    claim: DnsName
    """The claim in the job's namespace."""
    mount_path: AbsolutePath
    """Path at which it is mounted, read-only."""
    storage_class: DnsName | None = None
    """Set: the claim is made with this class when missing. Left out: it must exist."""
    size: Quantity = "1Gi"
    """The size asked for when the claim is made."""


class ClusterPod(Model):
    """Settings of every pod of every job on this cluster."""

    volumes: Annotated[list[ClusterVolume], Field(max_length=16, json_schema_extra=list_map())] = []
    """Claims mounted read-only."""
    env: Annotated[list[PlainVariable], Field(max_length=64, json_schema_extra=list_map())] = []
    """Variables. A job's own win. Their values have at most 131072 bytes in all."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints that the pods tolerate, besides a job's own and nvidia.com/gpu's."""
    image_pull_secrets: Annotated[list[DnsName], Field(max_length=8, json_schema_extra=list_set())] = []
    """Secrets with registry logins, besides a job's own: in each namespace with jobs, and in lockstep-system for the operator's image."""
    runtime_class_name: DnsName | None = None
    """The RuntimeClass of pods that ask for GPUs, for example nvidia. Left out: the node's own default."""

    RULES = (values_fit(128 << 10, "every pod of every job has them"),)


class TrainingClusterSpec(Model):
    """The cluster's hardware and storage, and what its jobs need there."""

    platform: Platform = Platform.OPENSHIFT
    nodes: Nodes = Nodes()
    storage: ClusterStorage = ClusterStorage()
    network: Network = Network()
    security: Security = Security()
    gpus: Gpus = Gpus()
    resources: Resources = Resources()
    nccl: Nccl = Nccl()
    image: Image | None = None
    """The image of jobs that don't say. Default: lockstep-trainer of the operator's own registry and tag, where its image is called
    lockstep-operator:TAG.
    """
    shm_size: Quantity = "32Gi"
    """Size of /dev/shm, in memory."""
    pod: ClusterPod = ClusterPod()
    notes: Annotated[str, Field(max_length=8192)] = ""
    """Free text for people; shown by lockstep deploy."""

    RULES = (
        Rule(
            "!has(self.nodes) || !has(self.nodes.gpuNodes) || size(self.nodes.gpuNodes) == 0"
            " || size(self.nodes.gpuNodes) >= self.gpus.defaultNodes",
            "nodes.gpuNodes must be empty or list at least gpus.defaultNodes nodes",
            lambda spec: not spec.nodes.gpu_nodes or len(spec.nodes.gpu_nodes) >= spec.gpus.default_nodes,
            field="nodes.gpuNodes",
        ),
        Rule(
            "!self.network.rdma.enabled || self.security.ipcLock || self.network.rdma.memlock == 'Unlimited'",
            "security.ipcLock must be true when network.rdma.enabled is true and network.rdma.memlock is Capability:"
            " a NIC can't use memory that a pod can't lock",
            lambda spec: not spec.network.rdma.enabled or spec.security.ipc_lock or spec.network.rdma.memlock is Memlock.UNLIMITED,
            field="security.ipcLock",
        ),
        Rule(
            "!(self.security.ipcLock && self.network.rdma.memlock == 'Unlimited')",
            "security.ipcLock may not be true when network.rdma.memlock is Unlimited: the capability would not be used",
            lambda spec: not (spec.security.ipc_lock and spec.network.rdma.memlock is Memlock.UNLIMITED),
            field="security.ipcLock",
        ),
    )


class ClusterMetadata(Model):
    """The part of metadata that Lockstep reads; the rest is the API server's."""

    model_config = Model.model_config | {"extra": "ignore"}

    name: DnsName
    annotations: dict[str, str] = {}


class TrainingCluster(Model):
    """A cluster, written down once: what it has and what its jobs need there."""

    model_config = Model.model_config | {"extra": "ignore"}

    api_version: Literal["lockstep.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["TrainingCluster"] = "TrainingCluster"
    metadata: ClusterMetadata
    spec: TrainingClusterSpec
