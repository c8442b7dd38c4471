"""ClusterProfile: a cluster, written down once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from lockstep.api.model import AbsolutePath, DnsLabel, DnsName, Image, LabelKey, Model, Quantity, Rule
from lockstep.api.names import API_VERSION, DATASETS_CLAIM, WORKSPACE_CLAIM
from lockstep.api.shared import FabricMode, Labels, NcclVariable, NodeNames, PlainVariable, StorageMode

InterfaceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]+$", max_length=32)]
ResourceName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=317)]


class Platform(StrEnum):
    """OpenShift assigns user ids by SCC; plain Kubernetes needs them stated."""

    OPENSHIFT = "OpenShift"
    KUBERNETES = "Kubernetes"


class Memlock(StrEnum):
    """How RDMA memory may be locked: by CAP_IPC_LOCK as UID 0, or because the runtime already lifted the limit."""

    CAPABILITY = "Capability"
    UNLIMITED = "Unlimited"


class Nodes(Model):
    """Which nodes may be used."""

    gpu_nodes: Annotated[NodeNames, Field(description="Host names that may be used; empty: any.")] = []
    selector: Annotated[Labels, Field(description="Labels a node must have.")] = {}
    rack_label: Annotated[LabelKey | None, Field(description="The node label that names the rack: pods of a job are preferably placed in one rack.")] = None  # fmt: skip


class ProfileStorage(Model):
    """What the cluster's storage can do."""

    mode: Annotated[StorageMode, Field(description="Default of jobs that don't say.")] = StorageMode.SHARED
    class_rwx: Annotated[
        DnsName | None, Field(description="The ReadWriteMany class of the Shared claims; left out: the cluster's default class.")
    ] = None
    class_rwo: Annotated[
        DnsName | None, Field(description="The ReadWriteOnce class of the PerPod claims; left out: the cluster's default class.")
    ] = None
    workspace_size: Quantity = "100Gi"
    datasets_size: Quantity = "500Gi"
    workspace_claim: DnsName = WORKSPACE_CLAIM
    datasets_claim: DnsName = DATASETS_CLAIM


class Rail(Model):
    """One RDMA NIC of a node: the Multus network that attaches it and the resource that counts it."""

    network: Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=317)]
    resource: ResourceName | None = None


class Rdma(Model):
    """The RDMA fabric. Only what is stated is set: an unset knob is NCCL's to choose."""

    enabled: bool = False
    devices: Annotated[list[InterfaceName], Field(max_length=32, description="NCCL_IB_HCA; empty: NCCL uses every device it sees.")] = []
    interfaces: Annotated[
        list[InterfaceName], Field(max_length=32, description="NCCL_SOCKET_IFNAME while RDMA is used: the rails' interfaces in the pod.")
    ] = []
    gid_index: Annotated[int | None, Field(ge=0, le=255, description="NCCL_IB_GID_INDEX")] = None
    gdr_level: Annotated[str | None, Field(pattern=r"^([0-5]|LOC|PIX|PXB|PHB|SYS)$", max_length=3, description="NCCL_NET_GDR_LEVEL")] = None
    cross_nic: Annotated[int | None, Field(ge=0, le=2, description="NCCL_CROSS_NIC")] = None
    ib_timeout: Annotated[int | None, Field(ge=1, le=31, description="NCCL_IB_TIMEOUT: 4.096 µs × 2^timeout")] = None
    min_nchannels: Annotated[int | None, Field(ge=1, le=64, description="NCCL_MIN_NCHANNELS")] = None
    rails: Annotated[list[Rail], Field(max_length=32, description="Networks and resources of every pod of an RDMA job.")] = []
    memlock: Memlock = Memlock.CAPABILITY
    dmabuf: Annotated[bool | None, Field(description="NCCL_DMABUF_ENABLE")] = None


class Tcp(Model):
    """The socket network."""

    interface_exclude: Annotated[
        str,
        Field(pattern=r"^\^[A-Za-z0-9_.:,@-]+$", max_length=256, description="NCCL_SOCKET_IFNAME as an exclusion, for example ^lo,docker0"),
    ] = "^lo,docker0"
    p2p_level: Annotated[str | None, Field(pattern=r"^([0-5]|LOC|NVL|PIX|PXB|PHB|SYS)$", max_length=3, description="NCCL_P2P_LEVEL")] = None


class Network(Model):
    """How the nodes are connected."""

    mode: Annotated[FabricMode, Field(description="What a job with fabric.mode Auto uses here; set by deploy-cluster MODE=.")] = (
        FabricMode.AUTO
    )
    rdma: Rdma = Rdma()
    tcp: Tcp = Tcp()
    mtu: Annotated[
        int | None, Field(ge=576, le=65535, description="MTU that the rails must have; given to ranks as LOCKSTEP_RAIL_MTU.")
    ] = None

    RULES = (
        Rule(
            "!(self.mode == 'RDMA' && !self.rdma.enabled)",
            "mode may not be RDMA when rdma.enabled is false",
            lambda n: not (n.mode is FabricMode.RDMA and not n.rdma.enabled),
            field="mode",
        ),
    )


class Security(Model):
    """Under what rights pods run."""

    service_account: Annotated[DnsName, Field(description="Made by deploy-cluster; jobs never make one.")] = "ml-dev-sa"
    requires_privileged_scc: Annotated[
        bool, Field(description="true: deploy-cluster prints the administrator's command that grants the SCC.")
    ] = False
    ipc_lock: Annotated[bool, Field(description="Add CAP_IPC_LOCK to RDMA pods, so that they can lock memory for the NIC.")] = False


class Gpus(Model):
    """The GPUs of a node."""

    per_node: Annotated[int, Field(ge=0, le=64)] = 0
    type: Annotated[str | None, Field(max_length=128, description="The value of the node label nvidia.com/gpu.product, or free text.")] = (
        None
    )
    default_nodes: Annotated[int, Field(ge=1, le=1024, description="Nodes of a job that doesn't say.")] = 2


class Amounts(Model):
    """CPU and memory."""

    cpu: Quantity | None = None
    memory: Quantity | None = None


class Resources(Model):
    """Requests and limits of every pod."""

    requests: Amounts = Amounts()
    limits: Amounts = Amounts()


class NcclDebug(StrEnum):
    WARN = "WARN"
    INFO = "INFO"
    TRACE = "TRACE"
    VERSION = "VERSION"


class Nccl(Model):
    debug: Annotated[NcclDebug | None, Field(description="NCCL_DEBUG")] = None
    env: Annotated[list[NcclVariable], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})] = []  # fmt: skip


class ProfileVolume(Model):
    """A claim that every pod of a job mounts read-only, for example a Python environment shared by all."""

    name: DnsLabel
    claim: DnsName
    mount_path: AbsolutePath
    storage_class: Annotated[
        DnsName | None, Field(description="Set: the claim is made with this class when missing. Left out: it must exist.")
    ] = None
    size: Quantity = "1Gi"


class ProfilePod(Model):
    """What every pod of every job has on this cluster."""

    volumes: Annotated[list[ProfileVolume], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})] = []  # fmt: skip
    env: Annotated[list[PlainVariable], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})] = []  # fmt: skip


class ClusterProfileSpec(Model):
    """What a cluster has and what its jobs need there."""

    platform: Platform = Platform.OPENSHIFT
    nodes: Nodes = Nodes()
    storage: ProfileStorage = ProfileStorage()
    network: Network = Network()
    security: Security = Security()
    gpus: Gpus = Gpus()
    resources: Resources = Resources()
    nccl: Nccl = Nccl()
    image: Annotated[Image | None, Field(description="The image of jobs that don't say.")] = None
    shm_size: Annotated[Quantity, Field(description="Size of /dev/shm.")] = "32Gi"
    pod: ProfilePod = ProfilePod()
    notes: Annotated[str, Field(max_length=8192, description="Free text for people; shown by deploy-cluster.")] = ""


class ProfileMetadata(Model):
    model_config = Model.model_config | {"extra": "ignore"}

    name: DnsName
    annotations: dict[str, str] = {}


class ClusterProfile(Model):
    """A cluster, written down once."""

    model_config = Model.model_config | {"extra": "ignore"}

    api_version: Literal["lockstep.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["ClusterProfile"] = "ClusterProfile"
    metadata: ProfileMetadata
    spec: ClusterProfileSpec
