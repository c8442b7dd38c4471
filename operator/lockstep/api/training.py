"""The settings of Lockstep's own trainer: what a TrainingJob has under spec.training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lockstep.api.model import ZERO_PATTERN, AbsolutePath, Decimal, Fraction, Model, Rule, Share, exactly_one, free_form_fits, no_password
from lockstep.api.shared import KEY_PATTERN, SecretKey
from lockstep_spec.choices import (
    ROW_KEYS,
    TEMPLATE_OWN,
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
from lockstep_spec.deepspeed import refusals
from lockstep_spec.modelnames import is_hub_name

ON_VOLUMES = "path on the volumes"
"""Marks a field that may name a path below /workspace or /datasets, which are elsewhere on a platform without pods."""
DATA_PATH_PATTERN = r"^(/[^\x00]*|(s3|gs|gcs|abfs|abfss)://[^\s/]+/[^\s]+)$"
DataPath = Annotated[str, Field(pattern=DATA_PATH_PATTERN, max_length=1024)]
"""A path, or an address of an object store."""
HubName = Annotated[str, Field(min_length=1, max_length=256)]
ConfigName = Annotated[str, Field(min_length=1, max_length=128)]
ColumnName = Annotated[str, Field(max_length=256)]
Split = Annotated[str, Field(min_length=1, max_length=128)]


def _known_columns(columns: dict[str, str] | None) -> dict[str, str] | None:
    unknown = sorted(key for key, name in (columns or {}).items() if name and key not in ROW_KEYS)
    if unknown:
        raise PydanticCustomError("unknown_key", f'may not hold {", ".join(unknown)} but with "": its keys are {", ".join(ROW_KEYS)}')
    return columns


class SampleSource(Model):
    """Samples from files, or from a dataset of the hub. evaluation.data has these fields and no others."""

    path: Annotated[DataPath | None, ON_VOLUMES] = None
    """A file, a pattern or a folder, as data.path."""
    name: HubName | None = None
    """A dataset of the Hugging Face hub, for example org/dataset; downloaded once a volume."""
    config: ConfigName | None = None
    """The configuration of a hub dataset or of a folder, for example wikitext-2-raw-v1. Left out: the only one, or the default one."""
    split: Split | None = None
    """Split, as data.split. Default: validation, or the only one."""
    revision: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    """The hub dataset's commit. Default: the newest one at the first download, then that one."""
    format: DataFormat = DataFormat.AUTO
    columns: Annotated[dict[str, ColumnName] | None, Field(max_length=16), AfterValidator(_known_columns)] = None
    """Columns that have other names than Lockstep's keys, for example {instruction: question, output: answer}; "": one that is not read."""

    RULES = (
        exactly_one("path", "name"),
        no_password("path"),
        Rule(
            "!has(self.revision) || has(self.name)",
            "revision may only be set with name: files and object stores have no revisions",
            lambda o: o.revision is None or o.name is not None,
            field="revision",
        ),
    )


class DataSource(SampleSource):
    """One of several sources of samples."""

    split: Split = "train"
    """The split of a hub dataset or of a folder; train[:1000] and train[:10%] take a part of it, train+test several."""
    weight: Decimal = "1"
    """Times that each sample of the source is seen in an epoch: 2 doubles it, 0.5 takes half of it."""


def _no_own_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    own = sorted(TEMPLATE_OWN & (variables or {}).keys())
    if own:
        raise PydanticCustomError("own_variable", f"may not hold {', '.join(own)}: Lockstep sets that itself for every chat")
    return variables


class Data(SampleSource):
    """The text to train on."""

    path: Annotated[DataPath | None, ON_VOLUMES] = None
    """A file of JSON lines, a table (Parquet, Arrow, CSV, TSV) or plain text, compressed or not; a pattern such as /datasets/*.parquet; a
    folder of such files; or an address of these in an object store, such as s3://bucket/folder.
    """
    split: Split = "train"
    """The split of a hub dataset or of a folder; train[:1000] and train[:10%] take a part of it, train+test several."""
    sources: Annotated[list[DataSource], Field(max_length=64)] = []
    """Several sources, instead of one path or name."""
    max_length: Annotated[int, Field(ge=8, le=1048576)] = 2048
    """Tokens of a sample; with packing, of a pack."""
    overlong: Overlong = Overlong.TRUNCATE
    train_on: TrainOn = TrainOn.ASSISTANT
    on_broken: OnBroken = OnBroken.FAIL
    chat_template: Annotated[AbsolutePath | None, ON_VOLUMES] = None
    """A file with the chat template to use instead of the tokenizer's own."""
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(max_length=64), AfterValidator(free_form_fits), AfterValidator(_no_own_variables)
    ] = None
    """Variables of the chat template, for example enable_thinking: false. A row's chat_template_kwargs go before them. At most 65536 bytes
    and 32 levels, and none that Lockstep sets itself: condition Accepted says it.
    """
    packing: bool = False
    """Put several samples into one sequence of maxLength tokens, kept apart by their positions."""

    RULES = (
        Rule(
            "(has(self.path) ? 1 : 0) + (has(self.name) ? 1 : 0) + (has(self.sources) && size(self.sources) > 0 ? 1 : 0) == 1",
            "must have exactly one of path, name and sources",
            lambda o: [o.path is not None, o.name is not None, bool(o.sources)].count(True) == 1,
        ),
        *SampleSource.RULES[1:],
    )


class Evaluation(Model):
    """Measurement of the loss on text that is not trained on."""

    data: SampleSource | None = None
    """Samples for evaluation of their own. Left out: holdout says which samples of the data are used."""
    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 50
    """Optimizer steps between two evaluations."""
    holdout: Share = "0.02"
    """The share of samples kept for evaluation, chosen by their content, for example 0.02. Not read with data."""
    samples: Annotated[int, Field(ge=1, le=1000000)] = 200
    """Held-out samples to evaluate at most, always the same ones."""


RESUME_PATTERN = r"^(Auto|None|/.*)$"
_HUB_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
MODEL_PATTERN = rf"^(/[^\x00]*|[a-z][a-z0-9]{{1,9}}://[^\s]+|{_HUB_PART}(/{_HUB_PART})?)$"
LayerName = Annotated[str, Field(min_length=1, max_length=256)]


class TokenSecret(SecretKey):
    """A key of a Secret in the job's namespace that holds a token of the hub."""

    key: Annotated[str, Field(pattern=KEY_PATTERN, max_length=253)] = "HF_TOKEN"
    """The key in it."""


class BaseModelSource(Model):
    """The base model, as transformers reads it."""

    name: Annotated[str, Field(pattern=MODEL_PATTERN, max_length=1024), ON_VOLUMES]
    """The folder of the model and its tokenizer, for example /workspace/models/Llama-3.1-8B; a model of the Hugging Face hub, for example
    zai-org/GLM-4.5-Air; or a folder of an object store, for example s3://models/Llama-3.1-8B. Models of the hub and of
    object stores are fetched into /workspace/cache/models before ranks load them, once a volume.
    """
    revision: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """The hub's branch, tag or commit. Default: its main branch. The first start resolves it to a commit, which all later starts of the job
    use.
    """
    token_secret: TokenSecret | None = None
    """The hub's token, for a gated or private model; ranks get it as HF_TOKEN."""
    quantization: Quantization = Quantization.NONE
    """The number format of the frozen base weights. NF4 needs Stage1 or Stage2."""

    RULES = (
        Rule(
            "!has(self.revision) || !(self.name.startsWith('/') || self.name.contains('://'))",
            "revision needs the name of a model of the hub, such as org/name",
            lambda m: m.revision is None or is_hub_name(m.name),
            field="revision",
        ),
        Rule(
            "!has(self.tokenSecret) || !(self.name.startsWith('/') || self.name.contains('://'))",
            "tokenSecret needs the name of a model of the hub, such as org/name; an object store's credentials go into env",
            lambda m: m.token_secret is None or is_hub_name(m.name),
            field="tokenSecret",
        ),
        no_password("name"),
    )


class Lora(Model):
    """The adapter to train. Not read with method Full."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """The adapter's rank, r."""
    alpha: Annotated[int, Field(ge=1, le=4096)] = 32
    """The adapter's output is scaled by alpha / rank."""
    dropout: Fraction = "0"
    """Dropout before the adapter, less than 1, for example 0.05."""
    target_modules: Annotated[list[LayerName], Field(min_length=1, max_length=64)] = [
        "q_proj", "k_proj", "v_proj", "o_proj",
    ]  # fmt: skip
    """Names of the layers that get an adapter."""
    target_parameters: Annotated[list[LayerName], Field(max_length=64)] = []
    """Names of parameters that get an adapter though they belong to no linear layer: the fused experts of a mixture-of-experts model, for
    example mlp.experts.gate_up_proj.
    """
    modules_to_save: Annotated[list[LayerName], Field(max_length=64)] = []
    """Names of layers that are trained whole and saved with the adapter, for example embed_tokens."""
    rank_stabilized: bool = False
    """Scale by alpha / √rank (rsLoRA)."""
    dora: bool = False
    """Learn each weight's magnitude beside its direction (DoRA)."""
    init_from: Annotated[AbsolutePath | None, ON_VOLUMES] = None
    """The folder of a PEFT adapter of the same shape whose weights the run starts with."""

    RULES = (
        Rule(
            "!has(self.targetParameters) || size(self.targetParameters) == 0 || !self.dora",
            "targetParameters need dropout 0 and dora false",
            lambda o: not o.target_parameters or (float(o.dropout) == 0 and not o.dora),
            field="targetParameters",
            schema={
                "anyOf": [
                    {"properties": {"targetParameters": {"maxItems": 0}}},
                    {"properties": {"dropout": {"pattern": ZERO_PATTERN, "maximum": 0}}},
                ]
            },
        ),
    )


class Optimization(Model):
    """Schedule and optimizer of the training."""

    epochs: Annotated[int, Field(ge=1, le=10000)] = 1
    """Passes over the data."""
    max_steps: Annotated[int | None, Field(ge=1, le=100000000)] = None
    """Stop after this many optimizer steps, even within an epoch."""
    learning_rate: Decimal = "2e-4"
    """The highest learning rate, for example 2e-4."""
    micro_batch_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """Samples of maxLength tokens that a rank takes at once: with batches Tokens, as many tokens of shorter ones."""
    global_batch_size: Annotated[int | None, Field(ge=1, le=1048576)] = None
    """Samples, or packed sequences, that an optimizer step sees over all ranks. Default: microBatchSize × ranks at the first start."""
    batches: Batches = Batches.TOKENS
    """Tokens: a step's samples are divided over ranks and micro-batches by their tokens and joined without padding. Rows: equal numbers of
    samples, padded to the longest. The update is the same. A run with checkpoints goes on as it began.
    """
    balance: Balance = Balance.EQUAL
    """Equal: every rank computes an equal share of a step's tokens. Measured: each rank computes as many as its speed, measured at every
    start, and its memory allow; for GPUs that are unlike. The global batch stays.
    """
    warmup_steps: Decimal = "0"
    """Steps in which the learning rate rises from 0; below 1 the part of all steps, rounded up, for example 0.03."""
    schedule: Schedule = Schedule.COSINE
    min_learning_rate_ratio: Fraction = "0"
    """The part of learningRate that Cosine and Linear fall to, for example 0.1. Not read with Constant."""
    offload: Offload = Offload.NONE
    """Device on which the optimizer's state lives and its step is computed: the rank's own, or the CPU."""
    non_finite: NonFinitePolicy = NonFinitePolicy.STOP
    recompute: Recompute = Recompute.AUTO
    """Activations that the backward pass computes again instead of keeping them, for less memory. Auto: by the memory plan as little as
    fits, in as few layers as fit: nothing; norms and gates; all but attention's output; all. None: nothing. All: all, for about a third
    more time. Losses and gradients are the same.
    """
    max_gradient_norm: Decimal = "1"
    """Gradients are clipped to this norm; 0 leaves them."""
    weight_decay: Decimal = "0"
    """Weight decay of all matrices. Norms and biases don't decay."""
    beta1: Fraction = "0.9"
    """Decay rate of Adam's running mean of gradients."""
    beta2: Fraction = "0.999"
    """Decay rate of Adam's running mean of squared gradients."""
    epsilon: Decimal = "1e-8"
    """Number that Adam adds to its denominator."""

    RULES = (
        Rule(
            "!has(self.globalBatchSize) || self.globalBatchSize >= self.microBatchSize",
            "globalBatchSize must be greater than or equal to microBatchSize",
            lambda o: o.global_batch_size is None or o.global_batch_size >= o.micro_batch_size,
            field="globalBatchSize",
        ),
        Rule(
            "self.balance != 'Measured' || self.batches == 'Tokens'",
            "balance Measured needs batches Tokens: ranks that are unlike share a step's tokens",
            lambda o: o.balance is not Balance.MEASURED or o.batches is Batches.TOKENS,
            field="balance",
        ),
        Rule("", "epsilon must be greater than 0", lambda o: float(o.epsilon) > 0, field="epsilon"),
        Rule(
            "",
            "warmupSteps must be a whole number of steps, or below 1 the part of all steps",
            lambda o: float(o.warmup_steps) < 1 or float(o.warmup_steps).is_integer(),
            field="warmupSteps",
        ),
    )


class Checkpoint(Model):
    """Commits of shards, and the commit that a start resumes from."""

    every_steps: Annotated[int, Field(ge=1, le=1000000)] = 100
    """Optimizer steps between two checkpoints."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 3
    """Checkpoints kept; the newest two always are."""
    resume_from: Annotated[str, Field(pattern=RESUME_PATTERN, max_length=1024), ON_VOLUMES] = "Auto"
    """Auto: the newest checkpoint of this job. None: from the start. A path: that checkpoint."""
    content: Content = Content.FULL
    replicas: Annotated[int, Field(ge=1, le=2)] = 1
    """Volumes that hold each shard, where every node has a volume of its own. With 2, any one volume may be lost."""


class Training(Model):
    """A fine-tuning by Lockstep's trainer on DeepSpeed ZeRO."""

    model: BaseModelSource
    method: Method = Method.LORA
    lora: Lora = Lora()
    zero_stage: ZeroStage = ZeroStage.STAGE2
    hierarchical_partition: HierarchicalPartition = HierarchicalPartition.AUTO
    """A whole copy of the frozen weights on each node under Stage3. Auto: where memory allows."""
    precision: Precision = Precision.BF16
    seed: Annotated[int, Field(ge=0, le=2147483647)] = 42
    """Seed of the sample order, dropout and the adapter's first weights."""
    data: Data
    optimization: Optimization = Optimization()
    evaluation: Evaluation | None = None
    """Measurement of the loss on text that is not trained on. Left out: no evaluation."""
    checkpoint: Checkpoint = Checkpoint()
    report_to: Annotated[list[Tracker], Field(max_length=8)] = [Tracker.TENSORBOARD]
    """Destinations of metrics besides the run's JSONL files. MLflow needs MLFLOW_TRACKING_URI and WandB a WANDB_API_KEY in spec.env; their
    other variables, such as MLFLOW_EXPERIMENT_NAME and WANDB_PROJECT, count, too.
    """
    deepspeed: Annotated[dict[str, Any] | None, Field(max_length=64), AfterValidator(free_form_fits)] = None
    """Settings of DeepSpeed as in its JSON file, laid over Lockstep's; what contradicts the fields above is refused. At most 65536 bytes
    and 32 levels: the API server can't check that, so that condition Accepted says it.
    """

    RULES = (
        Rule(
            "self.model.name == oldSelf.model.name && self.model.quantization == oldSelf.model.quantization && has(self.model.revision) =="
            " has(oldSelf.model.revision) && (!has(self.model.revision) || self.model.revision == oldSelf.model.revision)",
            "model may not be changed after creation, except for its tokenSecret: create another job for another base model",
            None,
            field="model",
        ),
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

    def _problems(self) -> Iterator[tuple[str, str]]:
        for path, problem in refusals(self.deepspeed, self.zero_stage, self.precision).items():
            yield f"deepspeed.{path}", f"deepspeed.{path} {problem}"
