"""The settings of Lockstep's own trainer: what a TrainingJob has under spec.training."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import AbsolutePath, Decimal, Model, Rule, immutable

RESUME_PATTERN = r"^(Auto|None|/.*)$"


class ZeroStage(StrEnum):
    """What DeepSpeed cuts into shards: optimizer state; also gradients; also weights. Stage1 stands for plain data parallel."""

    STAGE1 = "Stage1"
    STAGE2 = "Stage2"
    STAGE3 = "Stage3"


class Precision(StrEnum):
    """The number format of weights and activations. Optimizer state is FP32 always."""

    BF16 = "BF16"
    FP32 = "FP32"


class Schedule(StrEnum):
    """How the learning rate falls after the warm-up."""

    COSINE = "Cosine"
    LINEAR = "Linear"
    CONSTANT = "Constant"


class BaseModelSource(Model):
    """The base model, as transformers reads it."""

    name: AbsolutePath
    """The folder of the model and its tokenizer, for example /workspace/models/Llama-3.1-8B."""


class Lora(Model):
    """The adapter to train."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """The adapter's rank, r."""
    alpha: Annotated[int, Field(ge=1, le=4096)] = 32
    """The adapter's output is scaled by alpha / rank."""
    dropout: Decimal = "0"
    """Dropout before the adapter, as text, for example "0.05"."""
    target_modules: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=64)] = [
        "q_proj", "k_proj", "v_proj", "o_proj",
    ]  # fmt: skip
    """Names of the layers that get an adapter."""


class Data(Model):
    """The text to train on."""

    path: AbsolutePath
    """A JSONL file with text, or prompt and completion, a line; or a plain text file."""
    max_length: Annotated[int, Field(ge=8, le=1048576)] = 2048
    """Tokens of a sample; longer ones are cut."""


def _batch_fits(o: Optimization) -> bool:
    return o.global_batch_size is None or o.global_batch_size >= o.micro_batch_size


class Optimization(Model):
    """How the adapter is trained."""

    epochs: Annotated[int, Field(ge=1, le=10000)] = 1
    """Passes over the data."""
    max_steps: Annotated[int | None, Field(ge=1, le=100000000)] = None
    """Stop after this many optimizer steps, even within an epoch."""
    learning_rate: Decimal = "2e-4"
    """The highest learning rate, as text, for example "2e-4"."""
    micro_batch_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """Samples a rank takes at once."""
    global_batch_size: Annotated[int | None, Field(ge=1, le=1048576)] = None
    """Samples an optimizer step sees over all ranks. Default: microBatchSize × ranks at the first start."""
    warmup_steps: Annotated[int, Field(ge=0, le=1000000)] = 0
    """Steps in which the learning rate rises from 0."""
    schedule: Schedule = Schedule.COSINE
    max_gradient_norm: Decimal = "1.0"
    """Gradients are clipped to this norm; "0" leaves them."""
    weight_decay: Decimal = "0"
    """AdamW's weight decay, as text."""

    RULES = (
        Rule(
            "!has(self.globalBatchSize) || self.globalBatchSize >= self.microBatchSize",
            "globalBatchSize must be greater than or equal to microBatchSize",
            _batch_fits,
            field="globalBatchSize",
        ),
    )


class Evaluation(Model):
    """How the loss on text that is not trained on is measured."""

    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Optimizer steps between two evaluations."""
    holdout: Decimal = "0.02"
    """The share of samples kept for evaluation, chosen by their content, for example "0.02"."""
    samples: Annotated[int, Field(ge=1, le=1000000)] = 200
    """Held-out samples to evaluate at most, always the same ones."""

    RULES = (
        Rule(
            "double(self.holdout) > 0.0 && double(self.holdout) <= 0.5",
            "holdout must be greater than 0 and at most 0.5",
            lambda e: 0.0 < float(e.holdout) <= 0.5,
            field="holdout",
        ),
    )


class Checkpoint(Model):
    """When shards are committed, and what a start resumes from."""

    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 100
    """Optimizer steps between two checkpoints."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 3
    """Checkpoints kept; the newest two always are."""
    resume_from: Annotated[str, Field(pattern=RESUME_PATTERN, max_length=1024)] = "Auto"
    """Auto: the newest checkpoint of this job. None: from the start. A path: that checkpoint."""


class Training(Model):
    """A LoRA fine-tuning by Lockstep's trainer on DeepSpeed ZeRO."""

    model: BaseModelSource
    lora: Lora = Lora()
    zero_stage: ZeroStage = ZeroStage.STAGE2
    precision: Precision = Precision.BF16
    seed: Annotated[int, Field(ge=0, le=2147483647)] = 42
    """Of the sample order, dropout and the adapter's first weights."""
    data: Data
    optimization: Optimization = Optimization()
    evaluation: Evaluation | None = None
    """How the loss on text that is not trained on is measured. Left out: no evaluation."""
    checkpoint: Checkpoint = Checkpoint()

    RULES = (immutable("model", "another base model is another job"),)
