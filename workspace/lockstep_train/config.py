"""What to train: the `training` section of run.json, read strictly.

An unknown key, a missing key or a wrong type is a ConfigError that names the field's path, because a setting that is
silently ignored costs a whole run. Numbers with a fraction are strings ("2e-4"): the API has no floats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep_sizes.settings import HierarchicalPartition as HierarchicalPartition
from lockstep_sizes.settings import Method as Method
from lockstep_sizes.settings import Offload as Offload
from lockstep_sizes.settings import Precision as Precision
from lockstep_sizes.settings import Quantization as Quantization
from lockstep_sizes.settings import ZeroStage as ZeroStage
from lockstep_train.errors import ConfigError
from lockstep_train.strict import (
    boolean,
    decimal,
    enumerated,
    integer,
    items,
    mapping,
    optional,
    positive,
    probability,
    refuse,
    section,
    share,
    string,
    strings,
)


class Schedule(Enum):
    """What the learning rate does after the warm-up."""

    COSINE = "Cosine"
    LINEAR = "Linear"
    CONSTANT = "Constant"


class DataFormat(Enum):
    """How samples stand in a file; Auto goes by its name."""

    AUTO = "Auto"
    JSONL = "JSONL"
    TEXT = "Text"


class Overlong(Enum):
    """What happens to a sample of more than `max_length` tokens."""

    TRUNCATE = "Truncate"
    DROP = "Drop"
    SPLIT = "Split"
    ERROR = "Error"


class TrainOn(Enum):
    """Which tokens are learned."""

    ASSISTANT = "Assistant"
    LAST_TURN = "LastTurn"
    ALL = "All"


class Optimizer(Enum):
    """AdamW decays weights apart from the gradient; Adam adds the decay to it."""

    ADAMW = "AdamW"
    ADAM = "Adam"


class NonFinitePolicy(Enum):
    """What happens when a loss or a gradient is not finite."""

    STOP = "Stop"
    SKIP = "Skip"


class Content(Enum):
    """What a commit holds: masters and moments, or the trained weights alone in the run's precision."""

    FULL = "Full"
    LITE = "Lite"


class Storage(Enum):
    """What the nodes see at the run's folder: one volume, or each a volume of its own."""

    SHARED = "Shared"
    PER_POD = "PerPod"


@dataclass(frozen=True)
class ModelConfig:
    name: str
    """Folder of the base model, with its tokenizer."""
    quantization: Quantization = Quantization.NONE


@dataclass(frozen=True)
class LoraConfig:
    rank: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...] = ()
    """Parameters of no linear layer that get an adapter: fused experts."""
    modules_to_save: tuple[str, ...] = ()
    """Layers that are trained whole."""
    rank_stabilized: bool = False
    dora: bool = False
    init_from: str | None = None
    """Folder of a PEFT adapter to start with."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of samples: a file (`path`) or a hub dataset (`name`, `split`, `revision`)."""

    path: str | None = None
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    format: DataFormat = DataFormat.AUTO
    weight: float = 1.0
    """How often each sample is seen in an epoch."""


@dataclass(frozen=True)
class DataConfig:
    """Exactly one of `path`, `name` and `sources` is set."""

    max_length: int
    """Tokens of the longest sample or, with packing, of a pack."""
    path: str | None = None
    """A .jsonl file (`text`, `prompt` and `completion`, or `messages`), or a plain text file."""
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    format: DataFormat = DataFormat.AUTO
    sources: tuple[SourceConfig, ...] = ()
    overlong: Overlong = Overlong.TRUNCATE
    train_on: TrainOn = TrainOn.ASSISTANT
    packing: bool = False


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
    optimizer: Optimizer = Optimizer.ADAMW
    offload: Offload = Offload.NONE
    non_finite: NonFinitePolicy = NonFinitePolicy.STOP
    gradient_checkpointing: bool = False
    max_gradient_norm: float = 1.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EvaluationDataConfig:
    path: str


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int
    holdout: float
    """Share of the samples kept out of training, chosen by a hash of their content; not read with `data`."""
    samples: int
    """At most so many of them are evaluated."""
    data: EvaluationDataConfig | None = None
    """A file of its own."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int
    keep: int
    resume_from: str
    """`Auto`, `None`, or the path of a commit."""
    content: Content = Content.FULL
    replicas: int = 1
    """Volumes that hold each shard, where every node has a volume of its own."""
    export_adapter: bool = False
    """Write a PEFT adapter folder beside each commit, in the background."""


@dataclass(frozen=True)
class MLflowConfig:
    tracking_uri: str
    experiment: str = "lockstep"


@dataclass(frozen=True)
class WandBConfig:
    project: str = "lockstep"
    entity: str | None = None


@dataclass(frozen=True)
class MetricsConfig:
    """Where metrics go besides the JSONL files."""

    tensor_board: bool = True
    mlflow: MLflowConfig | None = None
    wandb: WandBConfig | None = None


@dataclass(frozen=True)
class LimitsConfig:
    collective_timeout_seconds: int = 600
    step_timeout_seconds: int | None = None
    """Default: 3 × the median step, at least 120 s."""


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
    method: Method = Method.LORA
    hierarchical_partition: HierarchicalPartition = HierarchicalPartition.AUTO
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    deepspeed: Mapping[str, Any] | None = None
    """Raw settings of DeepSpeed, laid over ours."""


@dataclass(frozen=True)
class RunConfig:
    """What the trainer reads of run.json; the rest of that file is the agent's."""

    job_name: str
    job_uid: str | None
    run_dir: Path
    training: TrainingConfig
    storage: Storage | None = None
    """None: nobody says, and nothing is checked."""


_model = section(ModelConfig, {"name": string, "quantization": enumerated(Quantization)})
_lora = section(
    LoraConfig,
    {
        "rank": positive,
        "alpha": positive,
        "dropout": probability,
        "target_modules": strings,
        "target_parameters": items(string),
        "modules_to_save": items(string),
        "rank_stabilized": boolean,
        "dora": boolean,
        "init_from": optional(string),
    },
)
_SOURCE = {
    "path": optional(string),
    "name": optional(string),
    "split": string,
    "revision": optional(string),
    "format": enumerated(DataFormat),
}
_data = section(
    DataConfig,
    {
        **_SOURCE,
        "max_length": lambda path, value: integer(path, value, minimum=2),
        "sources": items(section(SourceConfig, {**_SOURCE, "weight": decimal})),
        "overlong": enumerated(Overlong),
        "train_on": enumerated(TrainOn),
        "packing": boolean,
    },
)
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
        "optimizer": enumerated(Optimizer),
        "offload": enumerated(Offload),
        "non_finite": enumerated(NonFinitePolicy),
        "gradient_checkpointing": boolean,
        "max_gradient_norm": decimal,
        "weight_decay": decimal,
    },
)
_evaluation = section(
    EvaluationConfig,
    {"every_steps": positive, "holdout": share, "samples": positive, "data": optional(section(EvaluationDataConfig, {"path": string}))},
)
_checkpoint = section(
    CheckpointConfig,
    {
        "every_steps": positive,
        "keep": positive,
        "resume_from": string,
        "content": enumerated(Content),
        "replicas": positive,
        "export_adapter": boolean,
    },
)
_metrics = section(
    MetricsConfig,
    {
        "tensor_board": boolean,
        "mlflow": optional(section(MLflowConfig, {"tracking_uri": string, "experiment": string})),
        "wandb": optional(section(WandBConfig, {"project": string, "entity": optional(string)})),
    },
)
_limits = section(LimitsConfig, {"collective_timeout_seconds": positive, "step_timeout_seconds": optional(positive)})
_training = section(
    TrainingConfig,
    {
        "model": _model,
        "method": enumerated(Method),
        "lora": _lora,
        "zero_stage": enumerated(ZeroStage),
        "hierarchical_partition": enumerated(HierarchicalPartition),
        "precision": enumerated(Precision),
        "seed": integer,
        "data": _data,
        "optimization": _optimization,
        "evaluation": optional(_evaluation),
        "checkpoint": _checkpoint,
        "metrics": _metrics,
        "limits": _limits,
        "deepspeed": optional(mapping),
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
        storage=optional(enumerated(Storage))(f"{source}: storage", document.get("storage")),
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
