"""TrainingJob.status: what is observed, never what is wished."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import Model


class ConditionType(StrEnum):
    """Every condition a job has, always all of them. Complete and Failed are terminal."""

    ACCEPTED = "Accepted"  # the spec and its profile can be used
    SUSPENDED = "Suspended"
    PODS_SCHEDULED = "PodsScheduled"
    RANKS_READY = "RanksReady"
    PROGRESSING = "Progressing"  # the summary: its reason is the one word of `kubectl get`
    CHECKPOINT_COMMITTED = "CheckpointCommitted"
    RESTARTING = "Restarting"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
Text = Annotated[str, Field(max_length=1024)]


class Condition(Model):
    """As metav1.Condition."""

    type: Annotated[str, Field(max_length=64)]
    status: ConditionStatus
    reason: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=128)]
    message: Annotated[str, Field(max_length=4096)]
    last_transition_time: Time
    observed_generation: Annotated[int, Field(ge=0)]


class Ranks(Model):
    desired: Annotated[int, Field(ge=0)]
    ready: Annotated[int, Field(ge=0)]


class ProfileInUse(Model):
    """The profile the running pods were made from, and the transport they use."""

    name: Text
    hash: Text
    transport: Text


class Metric(Model):
    name: Annotated[str, Field(max_length=64)]
    value: Annotated[str, Field(max_length=64)]


class TrainerStatus(Model):
    """What the trainer last said; written at most every 15 seconds."""

    activity: Text | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    total_steps: Annotated[int, Field(ge=0)] | None = None
    progress_percentage: Annotated[int, Field(ge=0, le=100)] | None = None
    estimated_remaining_seconds: Annotated[int, Field(ge=0)] | None = None
    metrics: Annotated[list[Metric], Field(max_length=32)] = []
    last_update_time: Time | None = None


class CheckpointStatus(Model):
    last_committed_step: Annotated[int, Field(ge=0)]
    last_commit_time: Time
    path: Text | None = None


class FailureStatus(Model):
    """The first failure of the job's last attempt."""

    rank: Annotated[int, Field(ge=0)] | None = None
    node: Annotated[int, Field(ge=0)] | None = None
    node_name: Text | None = None
    exit_code: int | None = None
    signal: Text | None = None
    exception: Text | None = None
    message: Annotated[str, Field(max_length=4096)] = ""
    last_lines: Annotated[list[Text], Field(max_length=20)] = []


class RunStatus(Model):
    """The frozen run that the pods use, and whether a newer one waits for the next start from zero."""

    name: Text
    pending: bool = False


class ResultStatus(Model):
    """Where a finished job left its adapter."""

    adapter: Text | None = None
    eval_loss_before: Annotated[str, Field(max_length=64)] | None = None
    eval_loss_after: Annotated[str, Field(max_length=64)] | None = None


class TrainingJobStatus(Model):
    """Observed state of a TrainingJob."""

    model_config = Model.model_config | {"extra": "ignore"}  # a newer operator's fields don't stop an older one

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]})] = []  # fmt: skip
    nodes: Annotated[int | None, Field(ge=0, description="Pods that exist; read by the scale subresource.")] = None
    selector: Annotated[str | None, Field(max_length=256, description="Label selector of the pods; read by the scale subresource.")] = None
    start_time: Time | None = None
    completion_time: Time | None = None
    attempts: Annotated[int, Field(ge=0, description="Starts of all ranks, restarts included.")] | None = None
    restarts: Annotated[int, Field(ge=0)] | None = None
    ranks: Ranks | None = None
    profile: ProfileInUse | None = None
    run: RunStatus | None = None
    trainer: TrainerStatus | None = None
    checkpoint: CheckpointStatus | None = None
    failure: FailureStatus | None = None
    result: ResultStatus | None = None
