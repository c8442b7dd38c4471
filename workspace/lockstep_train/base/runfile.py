"""Inputs of a rank: run.json, with its section `training` strictly and what it needs of the rest, which is the agent's; and torchrun's and
the agent's variables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep_spec.choices import StorageMode, Timeouts
from lockstep_spec.codec import ContractError, from_json, settings_from_json
from lockstep_spec.training import Count, Text, TrainingConfig
from lockstep_train.base.errors import ConfigError, refusal

SECRET_FILE = "LOCKSTEP_SECRET_FILE"  # noqa: S105 (a variable's name)


@dataclass(frozen=True)
class Origin:
    """Origin of a fetched base model."""

    name: str
    revision: str | None
    """Revision as the job has it."""
    pin: str
    """The hub's commit, or the digest of an object store's listing."""


@dataclass(frozen=True)
class RunConfig:
    """The part of run.json that the trainer reads; the rest is the agent's."""

    job_name: str
    job_uid: str | None
    run_dir: Path
    training: TrainingConfig
    storage: StorageMode | None = None
    """None: nobody says, and nothing is checked."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    node_micro_batches: tuple[int, ...] = ()
    """Samples that each rank of node i computes at once; 0: as `training` says, which empty means for all."""
    stated_model: str = ""
    """The base model as the job names it; '' where that isn't known."""
    origin: Origin | None = None
    """Set once the model is fetched; None for a model that is a folder."""


@dataclass(frozen=True)
class _Job:
    name: Text
    uid: str | None = None


@dataclass(frozen=True)
class _RunFile:
    job: _Job
    run_dir: Text
    storage: StorageMode | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    node_micro_batches: tuple[Count, ...] = ()
    base_model: str = ""


def parse_training(value: object) -> TrainingConfig:
    """Return the section `training` of run.json. Raises ConfigError naming the first field that is wrong."""
    try:
        return settings_from_json(TrainingConfig, value, "training")
    except ContractError as error:
        raise ConfigError(str(error)) from None


def parse_run(document: object, source: str) -> RunConfig:
    """Return the trainer's part of run.json: `job`, `runDir`, `storage`, `timeouts`, `nodeMicroBatches`, `baseModel`,
    `training`. Raises ConfigError.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{source} holds no JSON object; it must be a run.json")
    if document.get("training") is None:
        raise ConfigError(f"{source} has no `training` section; this trainer runs only jobs that have one")
    try:
        run = from_json(_RunFile, document, source)
    except ContractError as error:
        raise ConfigError(str(error)) from None
    return RunConfig(
        job_name=run.job.name,
        job_uid=run.job.uid or None,
        run_dir=Path(run.run_dir),
        training=parse_training(document["training"]),
        storage=run.storage,
        timeouts=run.timeouts,
        node_micro_batches=run.node_micro_batches,
        stated_model=run.base_model,
    )


def read_run(path: Path) -> RunConfig:
    """Return what run.json holds. Raises ConfigError when it can't be read or is not valid."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(f"{path} can't be read ({error.strerror}); give the run's file with --run or LOCKSTEP_RUN", error) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return parse_run(document, str(path))


@dataclass(frozen=True)
class RankEnvironment:
    """Place of this process among the ranks, in torchrun's variables; a lone process is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    """The node's number, which stays when ranks are ordered otherwise at the next start: a volume of its own belongs to it."""
    nodes: int
    master_address: str
    master_port: int
    attempt: int | None
    """The attempt's number, or None when nobody counts (run by hand): the next free one is taken."""
    report_socket: str | None
    gpus_per_node: int
    """GPUs that each node holds for the run; 0: it trains on CPUs, or nobody says."""
    secret_file: str | None = None
    """File of the secret that the run's agents have in common; None: no agent has started this rank."""


def ignored_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A line for each variable that people set and nothing reads."""
    values = os.environ if environ is None else environ
    if "NCCL_TIMEOUT" not in values:
        return []
    return [
        f"NCCL_TIMEOUT={values['NCCL_TIMEOUT']} has no effect: neither NCCL nor PyTorch reads it; set spec.hangTimeouts.collectiveSeconds"
    ]


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read torchrun's and the agent's variables. Raises ConfigError for a value that is no number."""
    values = os.environ if environ is None else environ

    def number(name: str, default: str) -> int:
        text = values.get(name, default)
        if not text.isdigit():
            raise ConfigError(f"the environment variable {name} is {text!r}, but must be a whole number")
        return int(text)

    return RankEnvironment(
        rank=number("RANK", "0"),
        world_size=number("WORLD_SIZE", "1"),
        local_rank=number("LOCAL_RANK", "0"),
        local_world_size=number("LOCAL_WORLD_SIZE", values.get("WORLD_SIZE", "1")),
        node=number("LOCKSTEP_NODE", values.get("GROUP_RANK", "0")),
        nodes=number("GROUP_WORLD_SIZE", "1"),
        master_address=values.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number("MASTER_PORT", "0"),
        attempt=number("LOCKSTEP_ATTEMPT", "1") if "LOCKSTEP_ATTEMPT" in values else None,
        report_socket=values.get("LOCKSTEP_REPORT_SOCKET"),
        gpus_per_node=number("GPUS_PER_NODE", "0"),
        secret_file=values.get(SECRET_FILE),
    )
