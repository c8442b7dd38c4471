"""TrainingJob.status: what is observed, never what is wished. Declared here once: its CRD, its bounds, and what builds it come from these
models.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import Model, list_map
from lockstep.api.preflightstatus import PreflightStatus
from lockstep.api.statuspart import Count, StatusPart, Text, Time

EXCLUDED_MAX = 16
Name = Annotated[str, Field(max_length=64)]
Seconds = Annotated[int, Field(ge=0)]
LONG_TEXT_MAX = 4096
LongText = Annotated[str, Field(max_length=LONG_TEXT_MAX)]


class FabricDifference(StatusPart):
    """Ranks of one node that are not as asked, or not as the others."""

    node: Count
    """The node's index in the job, which is the pod's too."""
    node_name: Text | None = None
    """The Node it runs on."""
    ranks: Name
    """Ranks that differ, for example 4–7."""
    why: Text
    """Difference, and its reason if NCCL names one."""


class FabricStatus(StatusPart):
    """Fabric that the ranks of the newest attempt use, from NCCL's own log. Condition FabricVerified judges it."""

    transport: Name | None = None
    """RDMA, TCP, NVLink, Plugin or gloo."""
    network: Name | None = None
    """NCCL's name of it, for example IB, Socket or a plugin's."""
    hcas: Annotated[list[Name], Field(max_length=64)] = []
    """RDMA devices that NCCL listed."""
    link: Name | None = None
    """IB or RoCE, with its speed where NCCL says it."""
    interfaces: Annotated[list[Name], Field(max_length=64)] = []
    """Network interfaces in use: of the data with TCP, else by which ranks find each other."""
    gpu_direct: Name | None = None
    """Path from NICs to GPU memory: DMA-BUF, nvidia-peermem, On (NCCL does not say which) or Off."""
    nccl_version: Name | None = None
    """The version that rank 0 or the first other one logged."""
    ranks_heard: Count = 0
    """Ranks whose log has named their network."""
    differing: Annotated[list[FabricDifference], Field(max_length=32)] = []
    """Ranks that differ, by node."""


class LossStatus(StatusPart):
    """Cost of all failures of one cause."""

    cause: Annotated[str, Field(max_length=64)]
    """Kind of the failure, as in failure.cause."""
    seconds: Seconds
    """Time down, and time of steps done again."""
    gpu_seconds: Seconds
    """The same, times the GPUs that the job held."""


class GoodputStatus(StatusPart):
    """Seconds since the job was accepted, by what they were spent on. Written with progress, otherwise at most every 5 minutes."""

    percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    """Training and evaluation, in per cent of the time since the pods ran, without the time stopped. Absent until a step was reported: a
    script that reports none may train or not, and a run that had nothing left to do has no goodput.
    """
    queued_seconds: Seconds = 0
    """Waiting for pods and nodes, with no failure to blame."""
    preflight_seconds: Seconds = 0
    """Checks before attempts."""
    load_seconds: Seconds = 0
    """Start of the ranks until their first step, if no failure came before."""
    train_seconds: Seconds = 0
    """Steps that were not done before."""
    unknown_seconds: Seconds = 0
    """The ranks of a script ran, which has reported no step yet."""
    evaluate_seconds: Seconds = 0
    """Evaluations."""
    save_seconds: Seconds = 0
    """Steps waited for a save, or results were written."""
    lost_seconds: Seconds = 0
    """Steps that a failure undid, done again."""
    down_seconds: Seconds = 0
    """Last step before a failure until the next step."""
    stopped_seconds: Seconds = 0
    """Requested stop until the next start."""
    losses: Annotated[list[LossStatus], Field(max_length=16)] | None = None
    """Lost and down, by cause."""


class ConditionType(StrEnum):
    """Every condition a job has, always all of them. Complete and Failed are terminal."""

    ACCEPTED = "Accepted"  # the spec and its cluster can be used
    SUSPENDED = "Suspended"
    PODS_SCHEDULED = "PodsScheduled"
    NODES_HEALTHY = "NodesHealthy"  # no pod is on a Node that is lost
    RANKS_READY = "RanksReady"
    FABRIC_VERIFIED = "FabricVerified"  # NCCL's own log says that the fabric is the one the job asked for
    STRAGGLING = "Straggling"  # a rank is slower than the others, which wait for it
    SAVES_FAILING = "SavesFailing"  # training goes on, and what it does is not saved
    PROGRESSING = "Progressing"  # the summary: its reason is the one word of `kubectl get`
    CHECKPOINT_COMMITTED = "CheckpointCommitted"
    RESTARTING = "Restarting"
    COMPLETE = "Complete"
    FAILED = "Failed"
    HELD = "Held"  # pods of a failed job stay for a look


class ConditionStatus(StrEnum):
    """Status of a condition: whether its type holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


REASON_PATTERN = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"


class Condition(StatusPart):
    """One observation of a job, as metav1.Condition."""

    type: Annotated[str, Field(max_length=64)]
    """Name of the condition, for example RanksReady."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(pattern=REASON_PATTERN, max_length=128)]
    """Reason in one word."""
    message: LongText
    """Explanation for a person."""
    last_transition_time: Time
    """Time of the last change of `status`."""
    observed_generation: Count
    """The generation of the spec that was looked at."""


class Ranks(StatusPart):
    """Ranks of the whole job."""

    desired: Count
    """Nodes × ranks a node."""
    ready: Count
    """Ranks whose process runs and has reported."""
    order: Annotated[list[Count], Field(max_length=1024)] | None = None
    """Nodes, by their index in the job, in the order of their ranks; unset: ranks follow the nodes' numbers."""


class ClusterInUse(StatusPart):
    """The TrainingCluster that the running pods were made from, and the transport they use."""

    name: Text
    """The TrainingCluster's name."""
    hash: Text
    """Tells whether the TrainingCluster has changed since."""
    transport: Text
    """RDMA or TCP."""


class Metric(StatusPart):
    """A number as the trainer wrote it."""

    name: Annotated[str, Field(max_length=64)]
    """For example loss."""
    value: Annotated[str, Field(max_length=64)]
    """For example "1.8312"."""


class TrainerStatus(StatusPart):
    """Newest progress of the trainer; written at most every 15 seconds."""

    activity: Text | None = None
    """Init, Fetch, Load, Step, Evaluate, Save or Export."""
    step: Count | None = None
    """The optimizer step reached."""
    total_steps: Count | None = None
    """Optimizer steps of the whole run."""
    progress_percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    """step of totalSteps, in per cent."""
    estimated_remaining_seconds: Count | None = None
    """Time to the end at the present speed."""
    metrics: Annotated[list[Metric], Field(max_length=32)] = []
    """The newest value of each metric."""
    last_update_time: Time | None = None
    """Time of that report."""


class CheckpointStatus(StatusPart):
    """The newest durable checkpoint."""

    last_committed_step: Count
    """Optimizer step of the checkpoint."""
    last_commit_time: Time
    """Time of the commit."""
    path: Text | None = None
    """Folder of the checkpoint on the workspace volume."""


class FailedSavesStatus(StatusPart):
    """Saves that have failed since the newest commit. Unset: the newest save was committed."""

    since: Time
    """Time at which the first of them failed."""
    count: Count
    """Number of saves that failed in a row."""
    step: Count
    """The optimizer step of the last of them."""
    message: Text
    """Reason: the rank, the path and the system's error."""


class FailureStatus(StatusPart):
    """The first failure of the job's last attempt."""

    rank: Count | None = None
    """The rank that failed first."""
    node: Count | None = None
    """Index of its node in the job, which is the pod's, too."""
    node_name: Text | None = None
    """The Node it ran on."""
    exit_code: int | None = None
    """Exit code of the rank."""
    signal: Text | None = None
    """The signal that ended it."""
    exception: Text | None = None
    """The Python exception's type."""
    cause: Text | None = None
    """Kind of the failure: UserCode, Configuration, OutOfMemory, Fabric, Storage, NodeLost, Preempted, Hang, NonFinite, Setup, Killed,
    Hardware or Internal.
    """
    step: Count | None = None
    """The last optimizer step that was reported before it."""
    activity: Text | None = None
    """Activity of a rank that hung."""
    stacks: Text | None = None
    """File on the workspace volume with the Python stacks of all threads of a rank that hung."""
    message: LongText = ""
    """The exception's message, or what else is known."""
    last_lines: Annotated[list[Text], Field(max_length=20)] = []
    """Last lines of output of the rank."""


class RestartStatus(StatusPart):
    """A failed attempt and what it cost."""

    attempt: Count
    """The attempt that failed."""
    time: Time
    """Time of the failure."""
    cause: Text
    """Kind of the failure, as in failure.cause, or Stopped: steps that were not saved when somebody stopped the job."""
    message: Text
    """First thing that happened."""
    rank: Count | None = None
    """The rank that failed first."""
    node: Count | None = None
    """Index of its node in the job."""
    lost_steps: Count
    """Steps done since the commit that the next attempt goes on from, which are done again."""
    downtime_seconds: Count | None = None
    """Seconds from downSince to the first step after it."""
    down_since: Time | None = None
    """Time of the attempt's last step. If it made none: of the attempt before it, else the time a lost node was last heard, else the time
    of the failure.
    """
    counts: bool = True
    """True if it counts toward restart.maxRestarts. A lost node, a preempted or an evicted pod does not count."""


class RunStatus(StatusPart):
    """The frozen run that the pods use, and whether a newer one waits for the next start from zero."""

    name: Text
    """The ConfigMap that holds it."""
    pending: bool = False
    """true: spec or TrainingCluster have changed since; the change takes effect at the next start from zero pods."""


class ResultStatus(StatusPart):
    """Adapter or model of a finished job, and its evaluation."""

    adapter: Text | None = None
    """The PEFT folder on the workspace volume."""
    model: Text | None = None
    """Folder of the model on the workspace volume, with method Full."""
    eval_loss_before: Annotated[str, Field(max_length=64)] | None = None
    """Loss on the held-out samples before training."""
    eval_loss_after: Annotated[str, Field(max_length=64)] | None = None
    """Loss on the same samples after training."""
    note: Text | None = None
    """Remark, for example that no steps were left to do, and how to train again."""


class InterferenceStatus(StatusPart):
    """Change that somebody else made to the job's own objects in the last ten minutes, and Lockstep's answer."""

    time: Time
    """Time at which Lockstep noticed it."""
    message: Text
    """The object, the change, and who made it, if known."""


class StopStatus(StatusPart):
    """The last requested stop (suspend, resize, deadline, a drained node), and whether the work until then was saved."""

    time: Time
    """Time at which the last rank had stopped."""
    attempt: Count
    """The attempt that was stopped."""
    save: Text
    """Saved, NotSaved, NothingToSave, or Unknown: the last report did not arrive, or a script doesn't say."""
    step: Count | None = None
    """The optimizer step of the newest commit."""
    lost_steps: Count | None = None
    """Steps done since that commit, to be done again."""
    message: Text = ""
    """Explanation for a person, with the reason."""


class ActiveTime(StatusPart):
    """Time that pods of the job have been on nodes; compared with spec.activeDeadlineSeconds."""

    since: Time | None = None
    """Start of the present time on nodes; unset: no pod is on a node."""
    earlier_seconds: Count = 0
    """The sum of all times before."""
    retry: Count | None = None
    """The spec.restart.retry that it is counted for: a retry starts anew."""


class PlacementStatus(StatusPart):
    """Nodes that a job holds while some of its pods have none, and when it releases them so that another job can run. Unset once every pod
    has a node.
    """

    placed: Count = 0
    """Pods that have a node; with retryTime: that had one when the job let go."""
    wanted: Count = 0
    """Pods that need one."""
    since: Time | None = None
    """Time at which the last pod got a node."""
    release_time: Time | None = None
    """Time at which the job releases its nodes unless all pods have one by then; unset: it holds none."""
    releases: Count | None = None
    """Number of releases since all its pods last had a node."""
    retry_time: Time | None = None
    """The job has released its nodes, and creates its pods again at this time, or once jobs that were created earlier have their nodes."""


class InteractiveStatus(StatusPart):
    """Script that a dev environment runs, and how long the environment has been idle."""

    script: Annotated[str, Field(max_length=256)] | None = None
    """Script that runs on all nodes, with its arguments; unset: none."""
    by: Annotated[str, Field(max_length=128)] | None = None
    """User who started it, and the machine."""
    since: Time | None = None
    """Start of the script."""
    idle_since: Time | None = None
    """Time of the last use of the environment; set once a warning was given."""
    release_time: Time | None = None
    """Time at which the GPUs are released, since nobody uses the environment; set with the warning."""
    released: Time | None = None
    """Time at which the GPUs were released. The pods are gone until the job is resumed."""
    retry: Count | None = None
    """spec.restart.retry at the release: a larger one brings the pods back."""


class ExcludedNode(StatusPart):
    """A node that this job no longer uses."""

    name: Annotated[str, Field(max_length=253)]
    """The Node."""
    time: Time
    """Time since when it is left out."""
    message: Text
    """Finding of preflight on that node."""


class TrainingJobStatus(StatusPart):
    """Observed state of a TrainingJob."""

    model_config = Model.model_config | {"extra": "ignore"}  # a newer operator's fields don't stop an older one

    observed_generation: Count | None = None
    """The generation of the spec that this status is about."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=list_map("type"))] = []
    """Every condition of the job; Complete and Failed are final."""
    nodes: Annotated[int | None, Field(ge=0)] = None
    """Pods that exist; 0 once the job has ended and lets them go. Read by the scale subresource."""
    running_nodes: Annotated[int | None, Field(ge=0)] = None
    """Pods of which all containers run."""
    selector: Annotated[str | None, Field(max_length=256)] = None
    """Label selector of the pods; read by the scale subresource."""
    start_time: Time | None = None
    """Time at which the job was first accepted."""
    completion_time: Time | None = None
    """Time at which it completed or failed."""
    attempts: Count | None = None
    """Starts of all ranks, restarts included."""
    restarts: Count | None = None
    """Starts of all ranks after a failure."""
    restarts_count_towards_max: Count | None = None
    """Failures since the last new checkpoint that count toward restart.maxRestarts; a new checkpoint sets it to 0 at the next failure."""
    retry: Count | None = None
    """restart.retry of the last start: what status says of an end is of that one."""
    restart_history: Annotated[list[RestartStatus], Field(max_length=10)] | None = None
    """The last failures and what each cost, the newest at the end."""
    ranks: Ranks | None = None
    cluster: ClusterInUse | None = None
    run: RunStatus | None = None
    trainer: TrainerStatus | None = None
    checkpoint: CheckpointStatus | None = None
    failed_saves: FailedSavesStatus | None = None
    failure: FailureStatus | None = None
    stop: StopStatus | None = None
    interference: InterferenceStatus | None = None
    active: ActiveTime | None = None
    placement: PlacementStatus | None = None
    fabric: FabricStatus | None = None
    result: ResultStatus | None = None
    goodput: GoodputStatus | None = None
    preflight: PreflightStatus | None = None
    interactive: InteractiveStatus | None = None
    excluded_nodes: Annotated[list[ExcludedNode], Field(max_length=EXCLUDED_MAX)] | None = None
    """Nodes that preflight found bad for this job: its pods are not placed there. Suspending the job clears the list."""
