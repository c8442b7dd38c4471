"""run.json as the trainer reads it: its section `training` strictly, and what it needs of the rest, which is the agent's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lockstep_spec.choices import StorageMode
from lockstep_spec.codec import ContractError, from_json, settings_from_json
from lockstep_spec.training import Text, TrainingConfig
from lockstep_train.base.errors import ConfigError, refusal


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


def parse_training(value: object) -> TrainingConfig:
    """Return the section `training` of run.json. Raises ConfigError naming the first field that is wrong."""
    try:
        training = settings_from_json(TrainingConfig, value, "training")
    except ContractError as error:
        raise ConfigError(str(error)) from None
    optimization = training.optimization
    if optimization.warmup_steps and optimization.warmup_ratio:
        raise ConfigError(
            f"training.optimization.warmupRatio is {optimization.warmup_ratio} and warmupSteps is {optimization.warmup_steps}, "
            "but only one can be set; set the other to 0"
        )
    return training


def parse_run(document: object, source: str) -> RunConfig:
    """Return the trainer's part of run.json: `job`, `runDir`, `storage`, `training`. Raises ConfigError."""
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
