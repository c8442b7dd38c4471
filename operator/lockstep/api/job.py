"""TrainingJob: one multi-node fine-tuning run."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.api.model import (
    DNS_NAME_PATTERN,
    TEXT_PATTERN,
    DnsLabel,
    DnsName,
    Image,
    Model,
    NumberOrQuantity,
    Rule,
    exactly_one,
    immutable,
    list_map,
    utf8_bytes,
)
from lockstep.api.names import API_VERSION, JOB_NAME_MAX, JOB_NAME_PATTERN
from lockstep.api.podtemplate import PodTemplate
from lockstep.api.shared import MAY_NAME_PATHS, FabricMode, ImagePullSecrets, Variable, VariableSet, values_fit
from lockstep.api.training import Training
from lockstep_spec.choices import DegradedPolicy, StorageMode, Timeouts

IDLE_SECONDS = 8 * 3600
IDLE_SECONDS_MAX = 366 * 86400


class JobType(StrEnum):
    """Batch: one run from start to end. Interactive: a dev environment, whose nodes run what they are asked to (`lockstep run --job`)."""

    BATCH = "Batch"
    INTERACTIVE = "Interactive"


Seconds = Annotated[int, Field(ge=5, le=604800)]


class HangTimeouts(Model):
    """Seconds that a rank may take before it counts as hung and all ranks are restarted. A script's activities count from its rank's first
    reported step on. Lockstep's trainer has limits of its own for all but stepSeconds and collectiveSeconds.
    """

    step_seconds: Seconds | None = None
    """Seconds of a step: with script from one reported step to the next report, with training of one batch of an evaluation, too. Default:
    3600 with script; with training 3 times the median step, at least 120.
    """
    collective_seconds: Seconds | None = None
    """Seconds that a collective operation of Lockstep's trainer waits for the other ranks. Default: 600."""
    evaluate_seconds: Seconds | None = None
    """Seconds in a script's activity Evaluate. Default: 7200."""
    save_seconds: Seconds | None = None
    """Seconds in a script's activity Save. Default: 3600."""
    load_seconds: Seconds | None = None
    """Seconds in a script's activity Init, Fetch or Load. Default: 14400."""
    export_seconds: Seconds | None = None
    """Seconds in a script's activity Export. Default: 14400."""


class PreflightMode(StrEnum):
    """Extent of the checks of all nodes before the ranks start."""

    AUTO = "Auto"
    FULL = "Full"
    BASIC = "Basic"
    NONE = "None"  # not Off, which is false in YAML unless it has quotes


LONGEST_SECONDS = 10 * 366 * 86400
ARGUMENTS_BYTES_MAX = 128 << 10
QueueName = Annotated[str, Field(pattern=DNS_NAME_PATTERN, max_length=63)]
"""A LocalQueue's name, as far as a label can hold it."""


class Fabric(Model):
    """Network between the ranks of different nodes."""

    mode: FabricMode = FabricMode.AUTO
    """Auto takes RDMA where the cluster has it. RDMA is refused, never silently TCP, where the cluster has none."""
    degraded_policy: DegradedPolicy = DegradedPolicy.WARN
    """Reaction to FabricVerified being False (docs/how-to/fabric.md): Fail ends the job with the reason, without a restart; Warn says so
    and goes on.
    """


class Storage(Model):
    """Volumes of /workspace and /datasets. Immutable: volumes are not moved under a job."""

    mode: StorageMode | None = None
    """Shared: claims of the namespace that all pods mount. PerPod: volumes of its own for every pod. Default: the cluster's."""
    workspace_claim_name: DnsName | None = None
    """An existing ReadWriteMany claim to use as /workspace instead of the cluster's."""

    RULES = (
        Rule(
            cel="!(has(self.mode) && self.mode == 'PerPod' && has(self.workspaceClaimName))",
            message="workspaceClaimName may not be set when mode is PerPod",
            holds=lambda s: not (s.mode is StorageMode.PER_POD and s.workspace_claim_name is not None),
            field="workspaceClaimName",
        ),
    )


_SHELL_PATTERN = r"[.](sh|bash|zsh|ksh|csh|fish|sbatch|slurm)$"
MODULE_PATTERN = r"^[^-/ \x00][^/ \x00]*$"
Argument = Annotated[str, Field(pattern=TEXT_PATTERN, max_length=4096)]
ScriptText = Annotated[str, Field(pattern=TEXT_PATTERN, min_length=1, max_length=1024)]


class Script(Model):
    """Your own program, started as every rank in torchrun's environment: a file, a module or a command."""

    path: ScriptText | None = None
    """A Python file, absolute or relative to folder."""
    module: Annotated[str, Field(pattern=MODULE_PATTERN, max_length=256)] | None = None
    """A Python module, run as `python3 -m` does."""
    command: Annotated[Annotated[list[Argument], Field(min_length=1, max_length=64)] | None, MAY_NAME_PATHS] = None
    """A program that isn't Python, and its first arguments, such as [bash, run.sh]."""
    args: Annotated[list[Argument], Field(max_length=256), MAY_NAME_PATHS] = []
    """Arguments, passed as they are: no shell reads them. On hosts and on this machine, paths below /workspace and /datasets are those of
    the folders that stand for them. With command at most 131072 bytes in all.
    """
    folder: ScriptText | None = None
    """The folder in which ranks work, absolute or relative to /workspace. Default: the folder of path, which is then relative to
    /workspace; without path /workspace.
    """
    local_rank: bool | None = None
    """true: pass --local_rank=N before args, as DeepSpeed's launcher does. Default: where the script's text takes the option."""

    RULES = (
        exactly_one("path", "module", "command"),
        Rule(
            f"!has(self.path) || !self.path.matches('{_SHELL_PATTERN}')",
            "path names a Python file: for a shell script write command: [bash, FILE] instead",
            lambda script: not re.search(_SHELL_PATTERN, script.path or ""),
            field="path",
        ),
        Rule(
            "!has(self.localRank) || !self.localRank || !has(self.command)",
            "localRank is for path and module: write the option into command or args",
            lambda script: not (script.local_rank and script.command),
            field="localRank",
        ),
        Rule(
            "(has(self.command) ? self.command.map(a, size(bytes(a))).sum() : 0) + (has(self.args) ? self.args.map(a,"
            f" size(bytes(a))).sum() : 0) <= {ARGUMENTS_BYTES_MAX}",
            f"args may have at most {ARGUMENTS_BYTES_MAX} bytes in all: put them into a file that the script reads",
            lambda script: utf8_bytes([*(script.command or ()), *script.args]) <= ARGUMENTS_BYTES_MAX,
            field="args",
        ),
    )


class OwnAmounts(Model):
    """CPU and memory of the ranks of a node together, at most the cluster's resources.limits. A pod requests them, and they are its limits.
    On hosts they are limits where systemd can keep them; where nothing does, as with --local, launch and join, a start says so. What is
    left out is the cluster's.
    """

    cpu: NumberOrQuantity | None = None
    """CPU cores, for example 32 or 500m."""
    memory: NumberOrQuantity | None = None
    """Memory, for example 128Gi."""


class Restart(Model):
    """Restarts of all ranks together after a failure."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts without a new checkpoint between them until the job fails; 0: the first failure is final. The same error of a script at the
    same step, twice, is final too.
    """
    backoff_seconds: Annotated[int, Field(ge=0, le=3600)] = 10
    """Wait before the second restart without a new checkpoint between them; doubled for each further one, up to 300, or to this where it is
    more. The first one doesn't wait; in a job that had failed before, its attempt begins at least this long after the one before began.
    """
    hold_on_failure_seconds: Annotated[int, Field(ge=0, le=604800)] = 0
    """Seconds that the pods, and their GPUs, stay after the final failure, for `kubectl exec`; 0: they go at once. Condition Held says
    until when. May be changed at any time. Has no effect without the operator.
    """
    lost_node_seconds: Annotated[int | None, Field(ge=0, le=86400)] = None
    """Seconds that a node may be NotReady before its pod is replaced on another one. The pod is force-deleted, even though its processes
    may still run. Default: never, and condition NodesHealthy says what to do. May be changed at any time. Has no effect without the
    operator.
    """
    retry: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Raise it to start a Failed job again (from its last checkpoint, if it has committed one) with a full budget of restarts, as `lockstep
    retry` does, or to bring back an Interactive job whose GPUs were released, as `lockstep resume` does.
    """

    RULES = (Rule("self.retry >= oldSelf.retry", "retry may only be raised", holds=None, field="retry"),)


def _one_work(spec: TrainingJobSpec) -> bool:
    works = [spec.training, spec.script].count(None)
    return works == (2 if spec.type is JobType.INTERACTIVE else 1)


def _has_no_end(spec: TrainingJobSpec) -> bool:
    ends = (spec.active_deadline_seconds, spec.ttl_seconds_after_finished, spec.hang_timeouts)
    return spec.type is JobType.BATCH or not any(end is not None for end in ends)


def _hang_timeouts_of_the_work(spec: TrainingJobSpec) -> bool:
    stated = set() if spec.hang_timeouts is None else set(spec.hang_timeouts.model_dump(exclude_none=True))
    return not (stated - {"step_seconds", "collective_seconds"} if spec.training else stated & {"collective_seconds"})


def _restarts_as_by_default(spec: TrainingJobSpec) -> bool:
    """The API server fills in defaults before it judges, so that only another value shows what was written."""
    usual = Restart()
    return spec.type is JobType.BATCH or (spec.restart.max_restarts, spec.restart.backoff_seconds) == (
        usual.max_restarts,
        usual.backoff_seconds,
    )


RANKS_MAX = 8192
"""Ranks of one gang: so many are proven (tests/bench/gang_scale.py)."""


def ranks_a_node(gpus: int | None, ranks: int | None) -> int:
    """One rank for every GPU; without GPUs as many as stated, else 1."""
    return gpus or ranks or 1


class TrainingJobSpec(Model):
    """Program to run, and the nodes to run it on. Fields left out come from the TrainingCluster."""

    cluster: DnsName | None = None
    """The TrainingCluster to run on. Default: the cluster annotated as the default. It may be set later, once."""
    type: JobType = JobType.BATCH
    """Batch: one run from start to end. Interactive: a dev environment, whose nodes wait for what `lockstep run --job` or
    launch_deepspeed.sh asks for.
    """
    nodes: Annotated[int | None, Field(ge=1, le=1024)] = None
    """Nodes, one pod each. Default: the cluster's. With all their ranks at most 8192: larger gangs are refused, since none has been tried.
    """
    gpus_per_node: Annotated[int | None, Field(ge=0, le=64)] = None
    """GPUs a node, one rank each; 0: CPU ranks over gloo. Default: the cluster's."""
    ranks_per_node: Annotated[int | None, Field(ge=1, le=64)] = None
    """Ranks a node when gpusPerNode is 0. Default: 1."""
    resources: OwnAmounts = OwnAmounts()
    image: Image | None = None
    """The image of every pod: with Python 3.10 or newer and, for training, with Lockstep's trainer. Default: the cluster's."""
    image_pull_secrets: ImagePullSecrets = []
    """Secrets of the namespace that hold registry logins."""
    fabric: Fabric = Fabric()
    storage: Storage = Storage()
    training: Training | None = None
    """A LoRA fine-tuning by Lockstep's own trainer. A Batch job has exactly one of training and script."""
    script: Script | None = None
    """Your own program, started as every rank. A Batch job has exactly one of training and script."""
    idle_seconds: Annotated[int | None, Field(ge=0, le=IDLE_SECONDS_MAX)] = None
    """The GPUs of an Interactive job are released so long after the last run ended and the last shell was used; an event says so half an
    hour before. 0: never. Default: 28800. docs/how-to/dev-environment.md says what counts as use.
    """
    env: Annotated[list[Variable], Field(max_length=128, json_schema_extra=list_map())] = []
    """Variables of every rank, their values at most 262144 bytes in all; NCCL's (NCCL_*) go before the cluster's. Those that the dynamic
    loader reads (LD_*, GLIBC_TUNABLES) are not in the container's environment, which a shell in the pod sees: only ranks get them.
    """
    env_from: Annotated[list[VariableSet], Field(max_length=16)] = []
    """Secrets and ConfigMaps whose keys become variables of every rank. Set what the dynamic loader reads (LD_*, GLIBC_TUNABLES) in env:
    from here it would reach the agent, too, and the keys aren't known beforehand.
    """
    restart: Restart = Restart()
    start_timeout_seconds: Seconds = Timeouts.start_seconds
    """Time limit of a start, restarts included: first for the nodes to come up, then for the ranks. After it the job fails and frees its
    GPUs (an Interactive job only if node 0 never runs). Time in which the cluster has no room for a pod, or a queue holds it back, doesn't
    count.
    """
    hang_timeouts: HangTimeouts | None = None
    """Limits after which a rank counts as hung."""
    preflight: PreflightMode = PreflightMode.AUTO
    """Checks of all nodes before the ranks start; an error stops the start and spends no restart. Auto: every check, where the job has GPUs
    a product on each of them whose result is known, and a short all-reduce where the cluster states network.minimumBusbw. Full: these two
    always, for the figures in status.preflight. Basic: without these two. None: no checks.
    """
    suspend: bool = False
    """true: no pods. The trainer is asked to save and stop first."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=LONGEST_SECONDS)] | None = None
    """The job fails, with DeadlineExceeded, when pods of it have been on nodes for so long in all, restarts included and suspended time
    not. It saves first.
    """
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=LONGEST_SECONDS)] | None = None
    """The job is deleted so long after it completed or failed; claims and what is on them stay. Unset: it stays."""
    queue_name: QueueName | None = None
    """The Kueue LocalQueue of the namespace that admits the job's pods. Takes effect at the next start from zero pods."""
    pod_template: PodTemplate = PodTemplate()

    RULES = (
        Rule(
            "self.type == 'Interactive' ? !has(self.training) && !has(self.script) : has(self.training) != has(self.script)",
            "must have exactly one of training and script, and neither when type is Interactive",
            _one_work,
        ),
        Rule(
            "!has(self.idleSeconds) || self.type == 'Interactive'",
            "idleSeconds may only be set when type is Interactive",
            lambda spec: spec.idle_seconds is None or spec.type is JobType.INTERACTIVE,
            field="idleSeconds",
        ),
        Rule(
            "self.type != 'Interactive' || !(has(self.activeDeadlineSeconds) || has(self.ttlSecondsAfterFinished) ||"
            " has(self.hangTimeouts))",
            "activeDeadlineSeconds, ttlSecondsAfterFinished and hangTimeouts may only be set when type is Batch: an Interactive job has no"
            " end, and its runs are not restarted",
            _has_no_end,
        ),
        Rule(
            "self.type != 'Interactive' || !has(self.restart) || (self.restart.maxRestarts == 3 && self.restart.backoffSeconds == 10)",
            "restart.maxRestarts and restart.backoffSeconds may only be set when type is Batch: runs of an Interactive job are not"
            " restarted",
            _restarts_as_by_default,
            field="restart",
        ),
        Rule(
            "!has(self.ranksPerNode) || !has(self.gpusPerNode) || self.gpusPerNode == 0 || self.ranksPerNode == self.gpusPerNode",
            "ranksPerNode may only be set when gpusPerNode is 0: every GPU has one rank",
            lambda spec: spec.ranks_per_node is None or not spec.gpus_per_node or spec.ranks_per_node == spec.gpus_per_node,
            field="ranksPerNode",
        ),
        Rule(
            "!has(self.nodes) || self.nodes * (has(self.gpusPerNode) && self.gpusPerNode > 0 ? self.gpusPerNode : has(self.ranksPerNode) ?"
            f" self.ranksPerNode : 1) <= {RANKS_MAX}",
            f"a job may have at most {RANKS_MAX} ranks, nodes times gpusPerNode (or ranksPerNode): use fewer nodes, or several jobs",
            lambda spec: (spec.nodes or 1) * ranks_a_node(spec.gpus_per_node, spec.ranks_per_node) <= RANKS_MAX,
            field="nodes",
        ),
        Rule(
            "!has(self.hangTimeouts) || (has(self.training) ? !has(self.hangTimeouts.evaluateSeconds) &&"
            " !has(self.hangTimeouts.saveSeconds) && !has(self.hangTimeouts.loadSeconds) && !has(self.hangTimeouts.exportSeconds) :"
            " !has(self.hangTimeouts.collectiveSeconds))",
            "hangTimeouts takes stepSeconds and collectiveSeconds with training, which has limits of its own for the rest, and all but"
            " collectiveSeconds with script",
            _hang_timeouts_of_the_work,
            field="hangTimeouts",
        ),
        Rule(
            "self.type == oldSelf.type",
            "type may not be changed after creation: delete the job and create it again",
            holds=None,
            field="type",
        ),
        values_fit(256 << 10, "put large ones into a ConfigMap that envFrom names"),
        immutable("cluster", "delete the job and create it again; its checkpoints are found under its name", from_unset=True),
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
    """One multi-node fine-tuning run: all its ranks start, fail and restart together."""

    model_config = Model.model_config | {"extra": "ignore"}  # status: written by the operator, parsed elsewhere

    api_version: Literal["lockstep.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["TrainingJob"] = "TrainingJob"
    metadata: JobMetadata
    spec: TrainingJobSpec

    def written(self) -> dict[str, Any]:
        """The object as somebody would write it: what is as the defaults have it is left out."""
        stated = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        return {"apiVersion": self.api_version, "kind": self.kind, **stated}
