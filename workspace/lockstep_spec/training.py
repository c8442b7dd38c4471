"""Settings of a training: run.json's section `training`, with the API's names and defaults, and with the bounds that the trainer relies
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from lockstep_spec.choices import (
    Balance,
    Batches,
    Content,
    DataFormat,
    HierarchicalPartition,
    Method,
    NonFinitePolicy,
    Offload,
    OnBroken,
    Overlong,
    Precision,
    Quantization,
    Recompute,
    Schedule,
    Tracker,
    TrainOn,
    ZeroStage,
)
from lockstep_spec.codec import Must, Quoted, at_least

Positive = Annotated[int, at_least(1)]
Count = Annotated[int, at_least(0)]
Text = Annotated[str, Must("a non-empty string", bool)]
Decimal = Annotated[float, Quoted('a decimal number ≥ 0 in quotes, such as "2e-4"', lambda number: bool(number >= 0))]
AboveZero = Annotated[float, Quoted('a decimal number > 0 in quotes, such as "1e-8"', lambda number: bool(number > 0))]
Fraction = Annotated[float, Quoted('a number ≥ 0 and < 1 in quotes, such as "0.05"', lambda number: 0 <= number < 1)]
Share = Annotated[float, Quoted('a share between 0 and 1 in quotes, such as "0.05"', lambda number: 0 < number < 1)]


@dataclass(frozen=True)
class ModelConfig:
    name: Text
    """Folder of the base model, with its tokenizer; or a name of a hub or an object store, until it is fetched (model/fetched.py)."""
    quantization: Quantization = Quantization.NONE
    revision: Text | None = None
    """The hub's branch, tag or commit; None: its main branch."""


@dataclass(frozen=True)
class LoraConfig:
    rank: Positive
    alpha: Positive
    dropout: Fraction
    target_modules: Annotated[tuple[Text, ...], Must("a non-empty list of strings", bool)]
    target_parameters: tuple[Text, ...] = ()
    """Parameters of no linear layer that get an adapter: fused experts."""
    modules_to_save: tuple[Text, ...] = ()
    """Layers that are trained whole."""
    rank_stabilized: bool = False
    dora: bool = False
    init_from: Text | None = None
    """Folder of a PEFT adapter to start with."""


@dataclass(frozen=True)
class SamplesConfig:
    """One source of samples: files (`path`: a file of JSON lines, a table or plain text; a pattern; or a folder of such files) or a hub
    dataset (`name`, `revision`). Of a folder and of a hub dataset, `config` and `split` say which files.
    """

    path: Text | None = None
    name: Text | None = None
    config: Text | None = None
    split: Text | None = None
    """None: validation, or the only one."""
    revision: Text | None = None
    format: DataFormat = DataFormat.AUTO
    columns: Mapping[str, str] | None = None
    """Our keys → the columns that are read for them, "": none; None: by their own names."""

    @property
    def weight(self) -> float:
        """Return the times that each sample is seen in an epoch."""
        return 1.0


@dataclass(frozen=True)
class SourceConfig(SamplesConfig):
    split: Text | None = "train"
    weight: Decimal = 1.0


@dataclass(frozen=True)
class DataConfig(SamplesConfig):
    """Exactly one of `path`, `name` and `sources` is set."""

    max_length: Annotated[int, at_least(2)] = field(kw_only=True)
    """Tokens of the longest sample or, with packing, of a pack."""
    split: Text = "train"
    sources: tuple[SourceConfig, ...] = ()
    overlong: Overlong = Overlong.TRUNCATE
    train_on: TrainOn = TrainOn.ASSISTANT
    packing: bool = False
    on_broken: OnBroken = OnBroken.FAIL
    chat_template: Text | None = None
    """A file with the template to use instead of the tokenizer's own."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the template."""


@dataclass(frozen=True)
class OptimizationConfig:
    epochs: Positive
    learning_rate: Decimal
    micro_batch_size: Positive
    max_steps: Positive | None = None
    global_batch_size: Positive | None = None
    """Samples an optimizer step; default: microBatchSize × ranks at the first start."""
    batches: Batches = Batches.TOKENS
    """Division of a fresh run's steps; a commit's own goes before it."""
    balance: Balance = Balance.EQUAL
    """Measured: the ranks' shares of a step's tokens differ (shares.py), and no checkpoint depends on them. Not read with Rows."""
    warmup_steps: Decimal = 0.0
    """Below 1 the part of all steps."""
    schedule: Schedule = Schedule.COSINE
    min_learning_rate_ratio: Fraction = 0.0
    """Part of `learning_rate` that the schedule ends at."""
    offload: Offload = Offload.NONE
    non_finite: NonFinitePolicy = NonFinitePolicy.STOP
    recompute: Recompute = Recompute.AUTO
    max_gradient_norm: Decimal = 1.0
    weight_decay: Decimal = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: AboveZero = 1e-8


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: Positive
    holdout: Share
    """Share of the samples kept out of training, chosen by a hash of their content; not read with `data`."""
    samples: Positive
    """At most so many of them are evaluated."""
    data: SamplesConfig | None = None
    """Samples of its own."""


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: Positive
    keep: Positive
    resume_from: Text
    """`Auto`, `None`, or the path of a commit."""
    content: Content = Content.FULL
    replicas: Positive = 1
    """Volumes that hold each shard, where every node has a volume of its own."""


@dataclass(frozen=True)
class TrainingConfig:
    model: ModelConfig
    lora: LoraConfig
    zero_stage: ZeroStage
    precision: Precision
    seed: Count
    data: DataConfig
    optimization: OptimizationConfig
    evaluation: EvaluationConfig | None
    checkpoint: CheckpointConfig
    method: Method = Method.LORA
    hierarchical_partition: HierarchicalPartition = HierarchicalPartition.AUTO
    report_to: tuple[Tracker, ...] = (Tracker.TENSORBOARD,)
    """Destinations of metrics besides the JSONL files."""
    deepspeed: Mapping[str, Any] | None = None
    """Raw settings of DeepSpeed, laid over ours."""
