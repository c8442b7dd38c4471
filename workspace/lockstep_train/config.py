"""What to train: the `training` section of run.json, read strictly.

An unknown key, a missing key or a wrong type is a ConfigError that names the field's path, because a setting that is
silently ignored costs a whole run. Numbers with a fraction are strings ("2e-4"): the API has no floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from lockstep_train.errors import ConfigError


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


T = TypeVar("T")


def camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def _refuse(path: str, value: object, valid: str) -> ConfigError:
    return ConfigError(f"{path} is {json.dumps(value)}, but must be {valid}")


def _integer(path: str, value: object, minimum: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise _refuse(path, value, f"a whole number ≥ {minimum}")
    return value


def _decimal(path: str, value: object) -> float:
    """A decimal number written as a string, finite and ≥ 0."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise _refuse(path, value, 'a decimal number ≥ 0 in quotes, such as "2e-4"')
    return number


def _string(path: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _refuse(path, value, "a non-empty string")
    return value


def _strings(path: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise _refuse(path, value, "a non-empty list of strings")
    return tuple(_string(f"{path}[{index}]", item) for index, item in enumerate(value))


def _enum(kind: type[Enum]) -> Callable[[str, object], Enum]:
    def read(path: str, value: object) -> Enum:
        for member in kind:
            if member.value == value:
                return member
        raise _refuse(path, value, "one of " + ", ".join(str(member.value) for member in kind))

    return read


def _optional(reader: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda path, value: None if value is None else reader(path, value)


def _section(kind: type[T], readers: Mapping[str, Callable[[str, object], Any]]) -> Callable[[str, object], T]:
    """A reader of one JSON object into `kind`; `readers` has one entry a field."""

    def read(path: str, value: object) -> T:
        if not isinstance(value, dict):
            raise _refuse(path, value, "an object")
        known = {camel(field.name): field for field in fields(kind)}  # type: ignore[arg-type]
        for key in value:
            if key not in known:
                raise ConfigError(f"{path}.{key} is not a setting; valid here: {', '.join(known)}")
        arguments: dict[str, Any] = {}
        for key, field in known.items():
            if key in value:
                arguments[field.name] = readers[field.name](f"{path}.{key}", value[key])
            elif field.default is MISSING:
                raise ConfigError(f"{path}.{key} is missing; a {kind.__name__} needs it")
        return kind(**arguments)

    return read


def _positive(path: str, value: object) -> int:
    return _integer(path, value, minimum=1)


def _share(path: str, value: object) -> float:
    number = _decimal(path, value)
    if not 0 < number < 1:
        raise _refuse(path, value, 'a share between 0 and 1 in quotes, such as "0.05"')
    return number


def _probability(path: str, value: object) -> float:
    number = _decimal(path, value)
    if number >= 1:
        raise _refuse(path, value, 'a probability ≥ 0 and < 1 in quotes, such as "0.05"')
    return number


_model = _section(ModelConfig, {"name": _string, "revision": _optional(_string)})
_lora = _section(LoraConfig, {"rank": _positive, "alpha": _positive, "dropout": _probability, "target_modules": _strings})
_data = _section(DataConfig, {"path": _string, "max_length": lambda path, value: _integer(path, value, minimum=2)})
_optimization = _section(
    OptimizationConfig,
    {
        "epochs": _positive,
        "max_steps": _optional(_positive),
        "learning_rate": _decimal,
        "micro_batch_size": _positive,
        "global_batch_size": _optional(_positive),
        "warmup_steps": _integer,
        "schedule": _enum(Schedule),
        "max_gradient_norm": _decimal,
        "weight_decay": _decimal,
    },
)
_evaluation = _section(EvaluationConfig, {"every_steps": _positive, "holdout": _share, "samples": _positive})
_checkpoint = _section(CheckpointConfig, {"every_steps": _positive, "keep": _positive, "resume_from": _string})
_training = _section(
    TrainingConfig,
    {
        "model": _model,
        "lora": _lora,
        "zero_stage": _enum(ZeroStage),
        "precision": _enum(Precision),
        "seed": _integer,
        "data": _data,
        "optimization": _optimization,
        "evaluation": _optional(_evaluation),
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
        raise _refuse(f"{source}: job", job, "an object with `name`")
    return RunConfig(
        job_name=_string(f"{source}: job.name", job.get("name")),
        job_uid=_optional(_string)(f"{source}: job.uid", job.get("uid") or None),
        run_dir=Path(_string(f"{source}: runDir", document.get("runDir"))),
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


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is, in torchrun's variables; a lone process is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    master_address: str
    master_port: int
    attempt: int | None
    """The attempt's number, or None when nobody counts (run by hand): the next free one is taken."""
    report_socket: str | None


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
        node=number("GROUP_RANK", "0"),
        nodes=number("GROUP_WORLD_SIZE", "1"),
        master_address=values.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number("MASTER_PORT", "0"),
        attempt=number("LOCKSTEP_ATTEMPT", "1") if "LOCKSTEP_ATTEMPT" in values else None,
        report_socket=values.get("LOCKSTEP_REPORT_SOCKET"),
    )
