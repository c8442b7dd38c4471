"""TrainingJob: one multi-node fine-tuning run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from lockstep.api.model import AbsolutePath, DnsLabel, DnsName, Image, Model, Quantity, Rule, immutable
from lockstep.api.names import API_VERSION, JOB_NAME_MAX, JOB_NAME_PATTERN
from lockstep.api.shared import (
    Annotations,
    FabricMode,
    ImagePullSecrets,
    Labels,
    LocalReference,
    NcclVariable,
    StorageMode,
    Variable,
    VariableSet,
)
from lockstep.api.training import Training


class Fabric(Model):
    """How the ranks of different nodes talk to each other."""

    mode: Annotated[FabricMode, Field(description="Auto takes RDMA where the profile has it. RDMA is refused, never silently TCP, where the profile has none.")] = FabricMode.AUTO  # fmt: skip
    nccl_env: Annotated[list[NcclVariable], Field(max_length=64, description="NCCL variables for experts. Unset ones are NCCL's own to choose.", json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})] = []  # fmt: skip


class Storage(Model):
    """Where /workspace and /datasets live. Immutable: volumes are not moved under a job."""

    mode: Annotated[StorageMode | None, Field(description="Shared: claims of the namespace that all pods mount. PerPod: volumes of its own for every pod. Default: the profile's.")] = None  # fmt: skip
    workspace_claim_name: Annotated[DnsName | None, Field(description="An existing ReadWriteMany claim to use as /workspace instead of the profile's.")] = None  # fmt: skip

    RULES = (
        Rule(
            cel="!(has(self.mode) && self.mode == 'PerPod' && has(self.workspaceClaimName))",
            message="workspaceClaimName may not be set when mode is PerPod",
            holds=lambda s: not (s.mode is StorageMode.PER_POD and s.workspace_claim_name is not None),
            field="workspaceClaimName",
        ),
    )


class Script(Model):
    """Your own program, started as every rank in torchrun's environment."""

    path: Annotated[str, Field(min_length=1, max_length=1024, description="A Python file, absolute or relative to /workspace.")]
    args: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=256, description="Passed as they are: no shell reads them.")] = []  # fmt: skip


class Restart(Model):
    """How often all ranks are started again together after a failure."""

    max_restarts: Annotated[int, Field(ge=0, le=1000, description="0: the first failure is final.")] = 3
    backoff_seconds: Annotated[
        int, Field(ge=0, le=3600, description="Wait before the first restart; doubled for each further one, up to 300.")
    ] = 10


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Model):
    """As in a pod."""

    key: Annotated[str, Field(max_length=317)] | None = None
    operator: TolerationOperator | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: TaintEffect | None = None
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None


class ClaimVolume(Model):
    claim_name: DnsName
    read_only: bool | None = None


class SecretVolume(Model):
    secret_name: DnsName


class EmptyVolume(Model):
    size_limit: Quantity | None = None


class ExtraVolume(Model):
    """One more volume of every pod. Kinds that reach into the node (hostPath and the like) are not offered."""

    name: DnsLabel
    mount_path: AbsolutePath
    config_map: LocalReference | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyVolume | None = None

    RULES = (
        Rule(
            cel="[has(self.configMap), has(self.secret), has(self.persistentVolumeClaim), has(self.emptyDir)].filter(x, x).size() == 1",
            message="must have exactly one of configMap, secret, persistentVolumeClaim and emptyDir",
            holds=lambda v: sum(x is not None for x in (v.config_map, v.secret, v.persistent_volume_claim, v.empty_dir)) == 1,
        ),
        Rule(
            cel="!(self.mountPath in ['/workspace', '/datasets', '/lockstep', '/dev/shm', '/tmp']) && !self.mountPath.startsWith('/etc/lockstep') && !self.mountPath.startsWith('/var/run/secrets')",
            message="mountPath must not be one of Lockstep's own: /workspace, /datasets, /lockstep, /dev/shm, /tmp, /etc/lockstep…, /var/run/secrets…",
            holds=lambda v: v.mount_path not in ("/workspace", "/datasets", "/lockstep", "/dev/shm", "/tmp") and not v.mount_path.startswith(("/etc/lockstep", "/var/run/secrets")),  # noqa: S108
            field="mountPath",
        ),
    )  # fmt: skip


class PodTemplate(Model):
    """What is added to every pod of the job."""

    labels: Labels = {}
    annotations: Annotations = {}
    node_selector: Labels = {}
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    priority_class_name: DnsName | None = None
    volumes: Annotated[list[ExtraVolume], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})] = []  # fmt: skip

    RULES = (
        Rule(
            cel="!has(self.labels) || self.labels.all(k, !k.startsWith('lockstep.dev/') && !k.startsWith('app.kubernetes.io/'))",
            message="labels must not use the prefixes lockstep.dev/ and app.kubernetes.io/: Lockstep sets those",
            holds=lambda p: not any(k.startswith(("lockstep.dev/", "app.kubernetes.io/")) for k in p.labels),
            field="labels",
        ),
    )


def _one_work(spec: TrainingJobSpec) -> bool:
    return (spec.training is None) != (spec.script is None)


def _ranks_match_gpus(spec: TrainingJobSpec) -> bool:
    return spec.ranks_per_node is None or not spec.gpus_per_node or spec.ranks_per_node == spec.gpus_per_node


class TrainingJobSpec(Model):
    """What to run, on how many nodes. Fields left out come from the cluster profile."""

    cluster_profile_name: Annotated[
        DnsName | None, Field(description="The ClusterProfile to run on. Default: the profile annotated as the default.")
    ] = None
    nodes: Annotated[int | None, Field(ge=1, le=1024, description="Nodes, one pod each. Default: the profile's.")] = None
    gpus_per_node: Annotated[
        int | None, Field(ge=0, le=64, description="GPUs a node, one rank each; 0: CPU ranks over gloo. Default: the profile's.")
    ] = None
    ranks_per_node: Annotated[int | None, Field(ge=1, le=64, description="Ranks a node when gpusPerNode is 0. Default: 1.")] = None
    image: Annotated[
        Image | None, Field(description="The image of every pod: Python 3.10 or newer is all it must have. Default: the profile's.")
    ] = None
    image_pull_secrets: ImagePullSecrets = []
    fabric: Fabric = Fabric()
    storage: Storage = Storage()
    training: Annotated[
        Training | None, Field(description="A LoRA fine-tuning by Lockstep's own trainer. Exactly one of training and script.")
    ] = None
    script: Annotated[Script | None, Field(description="Your own program. Exactly one of training and script.")] = None
    env: Annotated[list[Variable], Field(max_length=128, description="Variables of every rank.", json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]})] = []  # fmt: skip
    env_from: Annotated[list[VariableSet], Field(max_length=16)] = []
    restart: Restart = Restart()
    suspend: Annotated[bool, Field(description="true: no pods. The trainer is told to save and stop first.")] = False
    pod_template: PodTemplate = PodTemplate()

    RULES = (
        Rule("has(self.training) != has(self.script)", "must have exactly one of training and script", _one_work),
        Rule(
            "!has(self.ranksPerNode) || !has(self.gpusPerNode) || self.gpusPerNode == 0 || self.ranksPerNode == self.gpusPerNode",
            "ranksPerNode may only be set when gpusPerNode is 0: every GPU has one rank",
            _ranks_match_gpus,
            field="ranksPerNode",
        ),
        immutable("clusterProfileName", "delete the job and create it again; its checkpoints are found under its name"),
        immutable("storage", "volumes are not moved under a job"),
    )


class JobMetadata(Model):
    """The part of metadata that Lockstep reads; the rest is the API server's."""

    model_config = Model.model_config | {"extra": "ignore"}

    name: Annotated[str, Field(pattern=JOB_NAME_PATTERN, max_length=JOB_NAME_MAX)]
    namespace: DnsLabel | None = None
    uid: str | None = None
    generation: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class TrainingJob(Model):
    """One multi-node fine-tuning run."""

    model_config = Model.model_config | {"extra": "ignore"}  # status: written by the operator, parsed elsewhere

    api_version: Literal["lockstep.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["TrainingJob"] = "TrainingJob"
    metadata: JobMetadata
    spec: TrainingJobSpec
