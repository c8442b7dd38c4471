"""The settings of Lockstep's own trainer: what a TrainingJob has under spec.training."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import AbsolutePath, Decimal, Model, Rule, immutable


class ZeroStage(StrEnum):
    """What DeepSpeed cuts into shards: optimizer state; also gradients; also weights. Stage1 stands for plain data parallel."""

    STAGE1 = "Stage1"
    STAGE2 = "Stage2"
    STAGE3 = "Stage3"


class Precision(StrEnum):
    BF16 = "BF16"
    FP32 = "FP32"


class Schedule(StrEnum):
    COSINE = "Cosine"
    LINEAR = "Linear"
    CONSTANT = "Constant"


class BaseModelSource(Model):
    """The base model, as transformers reads it."""

    name: Annotated[
        AbsolutePath, Field(description="The folder of the model and its tokenizer, for example /workspace/models/Llama-3.1-8B.")
    ]


class Lora(Model):
    """The adapter to train."""

    rank: Annotated[int, Field(ge=1, le=1024, description="The adapter's rank, r.")] = 16
    alpha: Annotated[int, Field(ge=1, le=4096, description="The adapter's scale is alpha / rank.")] = 32
    dropout: Annotated[Decimal, Field(description='Dropout before the adapter, as text, for example "0.05".')] = "0"
    target_modules: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=64, description="Names of the layers that get an adapter.")] = ["q_proj", "k_proj", "v_proj", "o_proj"]  # fmt: skip


class Data(Model):
    """The text to train on."""

    path: Annotated[AbsolutePath, Field(description="A JSONL file with text, or prompt and completion, a line; or a plain text file.")]
    max_length: Annotated[int, Field(ge=8, le=1048576, description="Tokens of a sample; longer ones are cut.")] = 2048


def _batch_fits(o: Optimization) -> bool:
    return o.global_batch_size is None or o.global_batch_size >= o.micro_batch_size


class Optimization(Model):
    """How the adapter is trained."""

    epochs: Annotated[int, Field(ge=1, le=10000)] = 1
    max_steps: Annotated[
        int | None, Field(ge=1, le=100000000, description="Stop after this many optimizer steps, even within an epoch.")
    ] = None
    learning_rate: Annotated[Decimal, Field(description='The highest learning rate, as text, for example "2e-4".')] = "2e-4"
    micro_batch_size: Annotated[int, Field(ge=1, le=4096, description="Samples a rank takes at once.")] = 1
    global_batch_size: Annotated[int | None, Field(ge=1, le=1048576, description="Samples an optimizer step sees over all ranks. Default: microBatchSize × ranks at the first start.")] = None  # fmt: skip
    warmup_steps: Annotated[int, Field(ge=0, le=1000000)] = 0
    schedule: Annotated[Schedule, Field(description="How the learning rate falls after the warm-up.")] = Schedule.COSINE
    max_gradient_norm: Annotated[Decimal, Field(description='Gradients are clipped to this norm; "0" leaves them.')] = "1.0"
    weight_decay: Decimal = "0"

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
    holdout: Annotated[
        Decimal, Field(description='The share of samples kept for evaluation, chosen by their content, for example "0.02".')
    ] = "0.02"
    samples: Annotated[int, Field(ge=1, le=1000000, description="Held-out samples to evaluate at most, always the same ones.")] = 200

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
    keep: Annotated[int, Field(ge=2, le=1000, description="Commits kept; the newest two always are.")] = 3
    resume_from: Annotated[str, Field(pattern=r"^(Auto|None|/.*)$", max_length=1024, description="Auto: the newest commit of this job. None: from the start. A path: that commit.")] = "Auto"  # fmt: skip


class Training(Model):
    """A LoRA fine-tuning by Lockstep's trainer on DeepSpeed ZeRO."""

    model: BaseModelSource
    lora: Lora = Lora()
    zero_stage: ZeroStage = ZeroStage.STAGE2
    precision: Precision = Precision.BF16
    seed: Annotated[int, Field(ge=0, le=2147483647)] = 42
    data: Data
    optimization: Optimization = Optimization()
    evaluation: Annotated[Evaluation | None, Field(description="Left out: no evaluation.")] = None
    checkpoint: Checkpoint = Checkpoint()

    RULES = (immutable("model", "another base model is another job"),)
