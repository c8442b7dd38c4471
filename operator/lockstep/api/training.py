"""The settings of Lockstep's own trainer: what a TrainingJob has under spec.training."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from lockstep.api.model import AbsolutePath, Decimal, Model, Rule, immutable

RESUME_PATTERN = r"^(Auto|None|/.*)$"
LayerName = Annotated[str, Field(min_length=1, max_length=256)]


class ZeroStage(StrEnum):
    """What DeepSpeed cuts into shards: optimizer state; also gradients; also weights. Stage1 stands for plain data parallel."""

    STAGE1 = "Stage1"
    STAGE2 = "Stage2"
    STAGE3 = "Stage3"


class Precision(StrEnum):
    """The number format of weights and activations. Optimizer state is FP32 always."""

    BF16 = "BF16"
    FP16 = "FP16"
    FP32 = "FP32"


class Schedule(StrEnum):
    """How the learning rate falls after the warm-up."""

    COSINE = "Cosine"
    LINEAR = "Linear"
    CONSTANT = "Constant"


class Method(StrEnum):
    """What is trained: a low-rank adapter beside the frozen base model, or every weight of it."""

    LORA = "LoRA"
    FULL = "Full"


class Quantization(StrEnum):
    """The number format of the frozen base weights: as they are, 4-bit NormalFloat, or 8-bit integers."""

    NONE = "None"
    NF4 = "NF4"
    INT8 = "Int8"


class BaseModelSource(Model):
    """The base model, as transformers reads it."""

    name: AbsolutePath
    """The folder of the model and its tokenizer, for example /workspace/models/Llama-3.1-8B."""
    quantization: Quantization = Quantization.NONE
    """The number format of the frozen base weights. NF4 and Int8 need Stage1 or Stage2."""


class Lora(Model):
    """The adapter to train. Not read with method Full."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """The adapter's rank, r."""
    alpha: Annotated[int, Field(ge=1, le=4096)] = 32
    """The adapter's output is scaled by alpha / rank."""
    dropout: Decimal = "0"
    """Dropout before the adapter, as text, for example "0.05"."""
    target_modules: Annotated[list[LayerName], Field(min_length=1, max_length=64)] = [
        "q_proj", "k_proj", "v_proj", "o_proj",
    ]  # fmt: skip
    """Names of the layers that get an adapter."""
    target_parameters: Annotated[list[LayerName], Field(max_length=64)] = []
    """Names of parameters that get an adapter though they belong to no linear layer: the fused experts of a mixture-of-experts model, for example mlp.experts.gate_up_proj."""
    modules_to_save: Annotated[list[LayerName], Field(max_length=64)] = []
    """Names of layers that are trained whole and saved with the adapter, for example embed_tokens."""
    rank_stabilized: bool = False
    """Scale by alpha / √rank (rsLoRA)."""
    dora: bool = False
    """Learn each weight's magnitude beside its direction (DoRA)."""
    init_from: AbsolutePath | None = None
    """The folder of a PEFT adapter of the same shape whose weights the run starts with."""

    RULES = (
        Rule(
            "!has(self.targetParameters) || size(self.targetParameters) == 0 || (double(self.dropout) == 0.0 && !self.dora)",
            'targetParameters need dropout "0" and dora false',
            lambda o: not o.target_parameters or (float(o.dropout) == 0 and not o.dora),
            field="targetParameters",
        ),
    )


class DataFormat(StrEnum):
    """How samples stand in a file: by its name, JSON lines, or plain text."""

    AUTO = "Auto"
    JSONL = "JSONL"
    TEXT = "Text"


class Overlong(StrEnum):
    """What happens to a sample of more than maxLength tokens."""

    TRUNCATE = "Truncate"
    DROP = "Drop"
    SPLIT = "Split"
    ERROR = "Error"


class TrainOn(StrEnum):
    """Which tokens are learned: the assistant's (or the completion), its last turn only, or all."""

    ASSISTANT = "Assistant"
    LAST_TURN = "LastTurn"
    ALL = "All"


class DataSource(Model):
    """One of several sources of samples."""

    path: AbsolutePath | None = None
    """A file, as data.path."""
    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """A dataset of the Hugging Face hub, for example org/dataset; downloaded once a volume."""
    split: Annotated[str, Field(min_length=1, max_length=128)] = "train"
    """The hub dataset's split."""
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """The hub dataset's commit. Default: the newest one at the first download, then that one."""
    format: DataFormat = DataFormat.AUTO
    weight: Decimal = "1"
    """How often each sample of the source is seen in an epoch, as text: "2" doubles it, "0.5" takes half of it."""

    RULES = (
        Rule(
            "has(self.path) != has(self.name)", "exactly one of path and name must be set", lambda o: (o.path is None) != (o.name is None)
        ),
    )


def _one_source(o: Data) -> bool:
    return [o.path is not None, o.name is not None, bool(o.sources)].count(True) == 1


class Data(Model):
    """The text to train on."""

    path: AbsolutePath | None = None
    """A JSONL file with text, prompt and completion, or messages, a line; or a plain text file."""
    name: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """A dataset of the Hugging Face hub, for example org/dataset; downloaded once a volume."""
    split: Annotated[str, Field(min_length=1, max_length=128)] = "train"
    """The hub dataset's split."""
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """The hub dataset's commit. Default: the newest one at the first download, then that one."""
    format: DataFormat = DataFormat.AUTO
    sources: Annotated[list[DataSource], Field(max_length=64)] = []
    """Several sources, instead of one path or name."""
    max_length: Annotated[int, Field(ge=8, le=1048576)] = 2048
    """Tokens of a sample; with packing, of a pack."""
    overlong: Overlong = Overlong.TRUNCATE
    train_on: TrainOn = TrainOn.ASSISTANT
    packing: bool = False
    """Put several samples into one sequence of maxLength tokens, kept apart by their positions."""

    RULES = (
        Rule(
            "(has(self.path) ? 1 : 0) + (has(self.name) ? 1 : 0) + (has(self.sources) && size(self.sources) > 0 ? 1 : 0) == 1",
            "exactly one of path, name and sources must be set",
            _one_source,
        ),
    )


def _batch_fits(o: Optimization) -> bool:
    return o.global_batch_size is None or o.global_batch_size >= o.micro_batch_size


class Optimizer(StrEnum):
    """AdamW decays weights apart from the gradient; Adam adds the decay to it."""

    ADAMW = "AdamW"
    ADAM = "Adam"


class Offload(StrEnum):
    """Where the optimizer's state lives and its step is computed."""

    NONE = "None"
    CPU = "CPU"


class NonFinitePolicy(StrEnum):
    """What happens when a loss or a gradient is not finite: the run ends, or that step is left out and counted."""

    STOP = "Stop"
    SKIP = "Skip"


class Optimization(Model):
    """How the weights are trained."""

    epochs: Annotated[int, Field(ge=1, le=10000)] = 1
    """Passes over the data."""
    max_steps: Annotated[int | None, Field(ge=1, le=100000000)] = None
    """Stop after this many optimizer steps, even within an epoch."""
    learning_rate: Decimal = "2e-4"
    """The highest learning rate, as text, for example "2e-4"."""
    micro_batch_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """Samples a rank takes at once."""
    global_batch_size: Annotated[int | None, Field(ge=1, le=1048576)] = None
    """Samples, or packed sequences, that an optimizer step sees over all ranks. Default: microBatchSize × ranks at the first start."""
    warmup_steps: Annotated[int, Field(ge=0, le=1000000)] = 0
    """Steps in which the learning rate rises from 0."""
    schedule: Schedule = Schedule.COSINE
    optimizer: Optimizer = Optimizer.ADAMW
    offload: Offload = Offload.NONE
    """Where the optimizer's state lives and its step is computed."""
    non_finite: NonFinitePolicy = NonFinitePolicy.STOP
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    max_gradient_norm: Decimal = "1.0"
    """Gradients are clipped to this norm; "0" leaves them."""
    weight_decay: Decimal = "0"
    """Weight decay, as text."""

    RULES = (
        Rule(
            "!has(self.globalBatchSize) || self.globalBatchSize >= self.microBatchSize",
            "globalBatchSize must be greater than or equal to microBatchSize",
            _batch_fits,
            field="globalBatchSize",
        ),
    )


class EvaluationData(Model):
    """Samples for evaluation from a file of their own."""

    path: AbsolutePath
    """A file, as data.path."""


class Evaluation(Model):
    """How the loss on text that is not trained on is measured."""

    data: EvaluationData | None = None
    """Samples for evaluation from a file of their own. Left out: holdout says which samples of the data are used."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Optimizer steps between two evaluations."""
    holdout: Decimal = "0.02"
    """The share of samples kept for evaluation, chosen by their content, for example "0.02". Not read with data."""
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


class Content(StrEnum):
    """What a checkpoint holds: FP32 masters and optimizer state, for an exact resume; or the trained weights alone."""

    FULL = "Full"
    LITE = "Lite"


class Checkpoint(Model):
    """When shards are committed, and what a start resumes from."""

    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 100
    """Optimizer steps between two checkpoints."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 3
    """Checkpoints kept; the newest two always are."""
    resume_from: Annotated[str, Field(pattern=RESUME_PATTERN, max_length=1024)] = "Auto"
    """Auto: the newest checkpoint of this job. None: from the start. A path: that checkpoint."""
    content: Content = Content.FULL
    replicas: Annotated[int, Field(ge=1, le=2)] = 1
    """Volumes that hold each shard, where every node has a volume of its own. With 2, any one volume may be lost."""
    export_adapter: bool = False
    """Write a PEFT adapter folder beside each checkpoint, in the background."""


class HierarchicalPartition(StrEnum):
    """Whether each node keeps a whole copy of the frozen weights (ZeRO++ hpZ), so that Stage3 gathers them within the node."""

    AUTO = "Auto"
    NODE = "Node"
    NONE = "None"


class Limits(Model):
    """How long the trainer waits."""

    collective_timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 600
    """For the other ranks, in one collective operation."""
    step_timeout_seconds: Annotated[int | None, Field(ge=10, le=86400)] = None
    """For one step, before the rank is taken for hung. Default: 3 times the median step, at least 120 seconds."""


class MLflow(Model):
    """Metrics to an MLflow server."""

    tracking_uri: Annotated[str, Field(min_length=1, max_length=1024)]
    """The server's address, or a file: URI."""
    experiment: Annotated[str, Field(min_length=1, max_length=256)] = "lockstep"
    """The experiment that the run is filed under."""


class WandB(Model):
    """Metrics to Weights & Biases. The key comes as WANDB_API_KEY from a Secret, by spec.env."""

    project: Annotated[str, Field(min_length=1, max_length=128)] = "lockstep"
    """The project that the run is filed under."""
    entity: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """The user or team that owns the project. Default: the key's own."""


class Metrics(Model):
    """Where metrics go besides the run's JSONL files."""

    tensor_board: bool = True
    """Event files in the run's folder, under logs/tensorboard."""
    mlflow: MLflow | None = None
    """Metrics to an MLflow server."""
    wandb: WandB | None = None
    """Metrics to Weights & Biases."""


class Training(Model):
    """A fine-tuning by Lockstep's trainer on DeepSpeed ZeRO."""

    model: BaseModelSource
    method: Method = Method.LORA
    lora: Lora = Lora()
    zero_stage: ZeroStage = ZeroStage.STAGE2
    hierarchical_partition: HierarchicalPartition = HierarchicalPartition.AUTO
    """Whether each node keeps a whole copy of the frozen weights under Stage3. Auto: where memory allows."""
    precision: Precision = Precision.BF16
    seed: Annotated[int, Field(ge=0, le=2147483647)] = 42
    """Of the sample order, dropout and the adapter's first weights."""
    data: Data
    optimization: Optimization = Optimization()
    evaluation: Evaluation | None = None
    """How the loss on text that is not trained on is measured. Left out: no evaluation."""
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    limits: Limits = Limits()
    deepspeed: Annotated[dict[str, Any] | None, Field(max_length=64)] = None
    """Settings of DeepSpeed as in its JSON file, laid over Lockstep's; what contradicts the fields above is refused."""

    RULES = (
        immutable("model", "another base model is another job"),
        Rule(
            "self.model.quantization == 'None' || (self.zeroStage != 'Stage3' && self.method == 'LoRA')",
            "model.quantization needs zeroStage Stage1 or Stage2 and method LoRA: Stage3 would cut packed weights into shards",
            lambda t: t.model.quantization is Quantization.NONE or (t.zero_stage is not ZeroStage.STAGE3 and t.method is Method.LORA),
            field="model.quantization",
        ),
        Rule(
            "self.hierarchicalPartition != 'Node' || self.zeroStage == 'Stage3'",
            "hierarchicalPartition Node needs zeroStage Stage3",
            lambda t: t.hierarchical_partition is not HierarchicalPartition.NODE or t.zero_stage is ZeroStage.STAGE3,
            field="hierarchicalPartition",
        ),
    )
