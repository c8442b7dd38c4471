"""A job with nothing left to decide, what its platform adds, and the refusal of a job that can't run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.api.cluster import Amounts, TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob, TrainingJobSpec
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.api.training import Training
from lockstep.plan.layers import Notice, Setting
from lockstep.plan.render.fabric import Transport, Variables
from lockstep_spec.choices import StorageMode

MADE_BY_OPERATOR = "<made by the operator>"
"""Stands in plain `render` for what only the operator knows. Not valid as a uid, a key or an image on purpose."""


class Refused(ConfigError):
    """The job can't run under this cluster; `refusals` has every reason at once."""

    def __init__(self, refusals: list[Notice]) -> None:
        super().__init__("; ".join(refusal.message for refusal in refusals))
        self.refusals = tuple(refusals)


@dataclass(frozen=True)
class PlatformDefaults:
    """Values of the platform where neither job nor cluster states one.

    `workspace` and `datasets` are the folders that /workspace and /datasets stand for: paths of the job that lie in them are
    rewritten (processes on a laptop have no such mounts).
    """

    workspace: str = WORKSPACE
    datasets: str = DATASETS
    namespace: str = "default"
    uid: str = MADE_BY_OPERATOR
    image: str | None = None
    excluded_nodes: tuple[str, ...] = ()
    """Nodes that preflight found bad for this job."""


@dataclass(frozen=True)
class Resolved:
    """A job with nothing left to decide. `settings` says for each value which layer set it."""

    job: TrainingJob
    profile: TrainingCluster
    platform: PlatformDefaults
    namespace: str
    uid: str
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    image: str
    transport: Transport
    nccl: Variables
    storage_mode: StorageMode
    workspace_claim: str
    spec: TrainingJobSpec
    """spec with real paths."""
    command: tuple[str, ...]
    """argv of every rank; empty: of an Interactive job, every run has its own."""
    folder: str
    """Folder in which ranks work."""
    training: Training | None
    """spec.training with real paths; None for a script."""
    warnings: tuple[Notice, ...]
    settings: tuple[Setting, ...]

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def suspend(self) -> bool:
        return self.job.spec.suspend

    def amounts(self, which: Literal["requests", "limits"]) -> dict[str, str]:
        """Return CPU and memory of a pod: the cluster's, but for the job's own, which are requests and limits alike."""
        stated: Amounts = getattr(self.profile.spec.resources, which)
        return {**stated.to_dict(), **self.spec.resources.to_dict()}

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node
