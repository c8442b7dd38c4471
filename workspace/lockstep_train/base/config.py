"""What to train, as the trainer reads it of run.json: names as in the API, defaults as there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_spec.choices import (
    Content,
    DataFormat,
    HierarchicalPartition,
    Method,
    NonFinitePolicy,
    Offload,
    OnBroken,
    Optimizer,
    Overlong,
    Precision,
    Quantization,
    Schedule,
    StorageMode,
    TrainOn,
    ZeroStage,
)


@dataclass(frozen=True)
class ModelConfig:
    name: str
    """Folder of the base model, with its tokenizer; or a name of a hub or an object store, until it is fetched (model/fetched.py)."""
    quantization: Quantization = Quantization.NONE
    revision: str | None = None
    """The hub's branch, tag or commit; None: its main branch."""


@dataclass(frozen=True)
class Origin:
    """Where a fetched base model came from."""

    name: str
    revision: str | None
    """As the job has it."""
    pin: str
    """The hub's commit, or the digest of an object store's listing."""


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
    """One source of samples: files (`path`) or a hub dataset (`name`, `revision`). Of a folder and of a hub dataset, `config` and `split` say which files."""

    path: str | None = None
    name: str | None = None
    config: str | None = None
    split: str | None = "train"
    """None: validation, or the only one."""
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
    """A file of JSON lines, a table or plain text; a pattern; or a folder of such files."""
    name: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    format: DataFormat = DataFormat.AUTO
    sources: tuple[SourceConfig, ...] = ()
    overlong: Overlong = Overlong.TRUNCATE
    train_on: TrainOn = TrainOn.ASSISTANT
    packing: bool = False
    on_broken: OnBroken = OnBroken.FAIL
    chat_template: str | None = None
    """A file with the template to use instead of the tokenizer's own."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the template."""


@dataclass(frozen=True)
class OptimizationConfig:
    epochs: int
    learning_rate: float
    micro_batch_size: int
    max_steps: int | None = None
    global_batch_size: int | None = None
    """Samples an optimizer step; default: microBatchSize × ranks at the first start."""
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    """Part of all steps; at most one of the two is set."""
    schedule: Schedule = Schedule.COSINE
    min_learning_rate_ratio: float = 0.0
    """Part of `learning_rate` that the schedule ends at."""
    optimizer: Optimizer = Optimizer.ADAMW
    offload: Offload = Offload.NONE
    non_finite: NonFinitePolicy = NonFinitePolicy.STOP
    gradient_checkpointing: bool = False
    max_gradient_norm: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True)
class EvaluationDataConfig:
    """As SourceConfig."""

    path: str | None = None
    name: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    format: DataFormat = DataFormat.AUTO


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int
    holdout: float
    """Share of the samples kept out of training, chosen by a hash of their content; not read with `data`."""
    samples: int
    """At most so many of them are evaluated."""
    data: EvaluationDataConfig | None = None
    """Samples of its own."""


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
    storage: StorageMode | None = None
    """None: nobody says, and nothing is checked."""
    origin: Origin | None = None
    """Set once the model is fetched; None for a model that is a folder."""
