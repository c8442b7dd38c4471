"""What to train: the `training` section of run.json, read strictly.

An unknown key, a missing key or a wrong type is a ConfigError that names the field's path, because a setting that is
silently ignored costs a whole run. Numbers with a fraction are strings ("2e-4"): the API has no floats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lockstep_train.errors import ConfigError
from lockstep_train.strict import decimal, enumerated, integer, optional, positive, probability, refuse, section, share, string, strings


class ZeroStage(Enum):
    """How much is sharded: optimizer state; and gradients; and weights."""

    STAGE1 = "Stage1"
    STAGE2 = "Stage2"
    STAGE3 = "Stage3"

    @property
    def number(self) -> int:
        return int(self.value[-1])


class Precision(Enum):
    """The dtype of weights and activations; masters and moments are always FP32."""

    BF16 = "BF16"
    FP32 = "FP32"


class Schedule(Enum):
    """What the learning rate does after the warm-up."""

    COSINE = "Cosine"
    LINEAR = "Linear"
    CONSTANT = "Constant"


@dataclass(frozen=True)
class ModelConfig:
    name: str
    """Folder of the base model, with its tokenizer."""
    revision: str | None = None


@dataclass(frozen=True)
class LoraConfig:
    rank: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]


@dataclass(frozen=True)
class DataConfig:
    path: str
    """A .jsonl file (`text`, or `prompt` and `completion`), or a plain text file."""
    max_length: int
    """Tokens of the longest sample; what is longer is cut."""


@dataclass(frozen=True)
class OptimizationConfig:
    epochs: int
    learning_rate: float
    micro_batch_size: int
    max_steps: int | None = None
    global_batch_size: int | None = None
    """Samples an optimizer step; default: microBatchSize × ranks at the first start."""
    warmup_steps: int = 0
    schedule: Schedule = Schedule.COSINE
    max_gradient_norm: float = 1.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int
    holdout: float
    """Share of the samples kept out of training, chosen by a hash of their content."""
    samples: int
    """At most so many of them are evaluated."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int
    keep: int
    resume_from: str
    """`Auto`, `None`, or the path of a commit."""


@dataclass(frozen=True)
class TrainingConfig:
    model: ModelConfig
    lora: LoraConfig
    zero_stage: ZeroStage
    precision: Precision
    seed: int
    data: DataConfig
    optimization: OptimizationConfig
    evaluation: EvaluationConfig | None
    checkpoint: CheckpointConfig


@dataclass(frozen=True)
class RunConfig:
    """What the trainer reads of run.json; the rest of that file is the agent's."""

    job_name: str
    job_uid: str | None
    run_dir: Path
    training: TrainingConfig


_model = section(ModelConfig, {"name": string, "revision": optional(string)})
_lora = section(LoraConfig, {"rank": positive, "alpha": positive, "dropout": probability, "target_modules": strings})
_data = section(DataConfig, {"path": string, "max_length": lambda path, value: integer(path, value, minimum=2)})
_optimization = section(
    OptimizationConfig,
    {
        "epochs": positive,
        "max_steps": optional(positive),
        "learning_rate": decimal,
        "micro_batch_size": positive,
        "global_batch_size": optional(positive),
        "warmup_steps": integer,
        "schedule": enumerated(Schedule),
        "max_gradient_norm": decimal,
        "weight_decay": decimal,
    },
)
_evaluation = section(EvaluationConfig, {"every_steps": positive, "holdout": share, "samples": positive})
_checkpoint = section(CheckpointConfig, {"every_steps": positive, "keep": positive, "resume_from": string})
_training = section(
    TrainingConfig,
    {
        "model": _model,
        "lora": _lora,
        "zero_stage": enumerated(ZeroStage),
        "precision": enumerated(Precision),
        "seed": integer,
        "data": _data,
        "optimization": _optimization,
        "evaluation": optional(_evaluation),
        "checkpoint": _checkpoint,
    },
)


def parse_training(value: object) -> TrainingConfig:
    """`training` as it stands in run.json. Raises ConfigError naming the first field that is wrong."""
    return _training("training", value)


def parse_run(document: object, source: str) -> RunConfig:
    """The trainer's part of run.json: `job`, `runDir`, `training`. Raises ConfigError."""
    if not isinstance(document, dict):
        raise ConfigError(f"{source} holds no JSON object; it must be a run.json")
    if document.get("training") is None:
        raise ConfigError(f"{source} has no `training` section; this trainer runs only jobs that have one")
    job = document.get("job")
    if not isinstance(job, dict):
        raise refuse(f"{source}: job", job, "an object with `name`")
    return RunConfig(
        job_name=string(f"{source}: job.name", job.get("name")),
        job_uid=optional(string)(f"{source}: job.uid", job.get("uid") or None),
        run_dir=Path(string(f"{source}: runDir", document.get("runDir"))),
        training=parse_training(document["training"]),
    )


def read_run(path: Path) -> RunConfig:
    """Read run.json. Raises ConfigError when it can't be read or is not valid."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); give the run's file with --run or LOCKSTEP_RUN") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return parse_run(document, str(path))
