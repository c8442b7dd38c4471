"""The config.yaml of a LoRA script, of Hugging Face's Trainer, Axolotl or LLaMA-Factory as a job file for Lockstep's trainer. Text in, text
out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from posixpath import basename
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.model import spelled
from lockstep.api.names import API_VERSION, DATASETS, WORKSPACE
from lockstep.api.training import MODEL_PATTERN
from lockstep.plan.discovery.draft import Entry, Item, left_out, stated, write
from lockstep.plan.translate.leaves import Leaf, Leftover, leaves_of

TRAINING = "spec.training"


@dataclass(frozen=True)
class Size:
    """Size of the job."""

    ranks: int | None
    """None: not known."""
    nodes: int | None = None
    """Number that the job file states; None: it leaves that to its cluster, as with the GPUs."""
    gpus_per_node: int | None = None


@dataclass(frozen=True)
class Translation:
    """A job file, and what it doesn't have."""

    text: str
    leftovers: tuple[Leftover, ...]
    model: str
    """The model as the file has it."""


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError("must be a whole number here")
    return int(value)


def _at_least(least: int, reason: str) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if _whole(value) < least:
            raise ValueError(reason)
        return _whole(value)

    return read


def _number(value: Any) -> str:
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or not isfinite(number):
        raise ValueError("must be a number")
    return spelled(number)


def _warm_up(value: Any) -> str:
    if float(_number(value)) <= 0:
        raise ValueError("no warm-up of so many steps")
    return _number(value)


def _names(value: Any) -> list[Item]:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be a list of names")
    if names in (["all-linear"], ["all"]):
        raise ValueError("name the layers: lora.targetModules has no word for all of them")
    return [Item(name) for name in names]


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _recomputed(value: Any) -> str:
    """Return Auto for true: it computes again what memory needs."""
    return "Auto" if _switch(value) else "None"


def _word(words: Mapping[str, str], otherwise: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        word = words.get(str(value).lower())
        if word is None:
            raise ValueError(otherwise)
        return word

    return read


def _only_if_true(word: str, otherwise: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value is not True:
            raise ValueError(otherwise)
        return word

    return read


def _resumed(value: Any) -> str:
    if isinstance(value, str) and value.startswith("/"):
        return value
    raise ValueError("checkpoint.resumeFrom is Auto by default: a job goes on from its newest checkpoint")


_SCHEDULES = {
    "cosine": "Cosine",
    "cosine_with_min_lr": "Cosine",
    "linear": "Linear",
    "constant": "Constant",
    "constant_with_warmup": "Constant",
}
FIELDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "max_length": ("data.maxLength", _whole),
    "packing": ("data.packing", _switch),
    "dataset_name": ("data.name", str),
    "dataset_config_name": ("data.config", str),
    "num_train_epochs": ("optimization.epochs", _at_least(1, "optimization.maxSteps states how long to train")),
    "max_steps": ("optimization.maxSteps", _at_least(1, "not set: optimization.epochs counts")),
    "learning_rate": ("optimization.learningRate", _number),
    "warmup_steps": ("optimization.warmupSteps", _warm_up),
    "warmup_ratio": ("optimization.warmupSteps", _warm_up),
    "lr_scheduler_type": ("optimization.schedule", _word(_SCHEDULES, "optimization.schedule is Cosine, Linear or Constant")),
    "min_lr_rate": ("optimization.minLearningRateRatio", _number),
    "weight_decay": ("optimization.weightDecay", _number),
    "max_grad_norm": ("optimization.maxGradientNorm", _number),
    "adam_beta1": ("optimization.beta1", _number),
    "adam_beta2": ("optimization.beta2", _number),
    "adam_epsilon": ("optimization.epsilon", _number),
    "gradient_checkpointing": ("optimization.recompute", _recomputed),
    "per_device_train_batch_size": ("optimization.microBatchSize", _whole),
    "eval_subset_size": ("evaluation.samples", _whole),
    "eval_steps": ("evaluation.everySteps", _at_least(1, "evaluation.everySteps counts steps, not a part of all")),
    "checkpoint_mode": ("checkpoint.content", _word({"lite": "Lite", "full": "Full"}, "checkpoint.content is Full or Lite")),
    "save_steps": ("checkpoint.everySteps", _at_least(1, "checkpoint.everySteps counts steps, not a part of all")),
    "save_total_limit": ("checkpoint.keep", _at_least(2, "the newest two checkpoints always stay")),
    "resume_from_checkpoint": ("checkpoint.resumeFrom", _resumed),
    "r": ("lora.rank", _whole),
    "lora_alpha": ("lora.alpha", _whole),
    "lora_dropout": ("lora.dropout", _number),
    "target_modules": ("lora.targetModules", _names),
    "target_parameters": ("lora.targetParameters", _names),
    "modules_to_save": ("lora.modulesToSave", _names),
    "use_rslora": ("lora.rankStabilized", _switch),
    "use_dora": ("lora.dora", _switch),
    "bf16": ("precision", _only_if_true("BF16", "precision says the number format: BF16 by default")),
    "fp16": ("precision", _only_if_true("FP16", "precision says the number format: BF16 by default")),
    "load_in_4bit": ("model.quantization", _only_if_true("NF4", "weights are not quantized by default")),
    "seed": ("seed", _whole),
    "ddp_timeout": ("hangTimeouts.collectiveSeconds", _whole),
}
"""Key of a config.yaml, without its section → field of spec.training (hangTimeouts: of spec), and how its value is read (ValueError: why it
can't be).
"""
MODEL_KEYS = ("name_or_path", "model_name_or_path", "base_model")
DATA_KEYS = ("dataset_path", "train_file", "datasets.path")
ALIASES = {
    "sequence_len": "max_length", "cutoff_len": "max_length", "max_seq_length": "max_length", "max_seq_len": "max_length",
    "num_epochs": "num_train_epochs", "micro_batch_size": "per_device_train_batch_size", "lora_r": "r", "lora_rank": "r",
    "lora_target_modules": "target_modules", "lora_target": "target_modules", "lr_scheduler": "lr_scheduler_type",
    "sample_packing": "packing", "optimizer": "optim", "max_grad_normalization": "max_grad_norm",
}  # fmt: skip
"""Names of Axolotl and LLaMA-Factory for the same."""
NOTHING = {
    "eval_dataset_type": "evaluation always takes a fixed subset; for all that is held out let evaluation.samples be larger than it",
    "optim": "the optimizer is torch's AdamW",
    "load_in_8bit": "model.quantization is NF4, or None",
    "logging_steps": "every step is logged; it costs no collective of its own",
    "report_to": "reportTo lists the trackers: TensorBoard by default",
    "logging_dir": "logs are in runs/JOB/logs of the workspace",
    "output_dir": "all files of the job are in runs/JOB of the workspace",
    "eval_strategy": "evaluation.everySteps counts steps",
    "evaluation_strategy": "evaluation.everySteps counts steps",
    "save_strategy": "checkpoint.everySteps counts steps",
    "per_device_eval_batch_size": "the evaluation's batch is optimization.microBatchSize",
    "load_best_model_at_end": "the best checkpoint is always kept; export it by its path",
    "deepspeed": "zeroStage says how to cut the model, and deepspeed takes single settings",
    "fsdp": "zeroStage: Stage3 is the same cut, by DeepSpeed",
    "data_seed": "seed is that of the data, too",
    "assistant_only_loss": "data.trainOn is Assistant by default",
    "completion_only_loss": "data.trainOn is Assistant by default",
    "train_on_eos": "answers are learned through their stop token",
    "roles_to_train": "data.trainOn says what is learned",
    "message_field_training": "train: false in a message leaves it out",
    "chat_template": "data.chatTemplate names a file with it",
    "chat_template_jinja": "data.chatTemplate names a file with it",
    "chat_template_path": "data.chatTemplate names a file on the volumes",
    "gradient_accumulation_steps": "optimization.globalBatchSize counts the one before it",
    "finetuning_type": "method is LoRA by default; Full trains every weight",
    "train_on_inputs": "data.trainOn is Assistant by default; All learns prompts, too",
    "val_set_size": "evaluation.holdout is the part that is held out",
    "quantization_bit": "model.quantization is NF4, or None",
    "min_lr": "optimization.minLearningRateRatio is min_lr / learning_rate",
    "dataloader_num_workers": "tokens are made once and kept on disk",
    "dataloader_pin_memory": "tokens are made once and kept on disk",
    "tensor_parallel_size": "nothing cuts single layers; zeroStage: Stage3 cuts the model over all ranks",
    "pipeline_parallel_size": "no pipeline; zeroStage: Stage3 cuts the model over all ranks",
}
"""Keys that need no field, with the reason."""
SECTION_REASONS = {
    "chat_template_kwargs": "data.chatTemplateKwargs takes it as it is",
    "fsdp_config": NOTHING["fsdp"],
    "deepspeed": NOTHING["deepspeed"],
    "cluster": "the machines have a file of their own: lockstep init hosts NAME --from FILE",
    "paths": "files are below /workspace and /datasets, a job's in runs/JOB",
    "datasets": "data.sources takes several sources",
}
"""Reasons for all keys of a section."""
UNKNOWN = "the trainer has no such setting"
NO_VALUE = "has no value"


def job_text(text: str, source: str, name: str, cluster: str | None, size: Size) -> Translation:
    """The job file of a config.yaml. `source`: its name; `cluster`: the job's, if it names one; `size`: ranks, by which a step's samples
    are counted.

    Raises ConfigError for a file without a model or without data.
    """
    leaves = leaves_of(text, source)
    reader = _Reader(size)
    for leaf in leaves:
        reader.read(leaf)
    missing = [
        f"{source}: names no {what}: it has none of the keys {', '.join(keys)}"
        for what, field, keys in (("model", "model.name", MODEL_KEYS), ("data", "data.", (*DATA_KEYS, "dataset_name")))
        if not any(key.startswith(field) and key != "data.maxLength" for key in reader.entries)
    ]
    if missing:
        raise ConfigError(*missing)
    written, model = _written(name, cluster, source, size, reader.finished()), str(reader.leaves["model.name"].value)
    return Translation(written, tuple(sorted(reader.leftovers, key=lambda one: one.line)), model)


def _written(name: str, cluster: str | None, source: str, size: Size, training: Sequence[Entry]) -> str:
    counts = (("nodes", size.nodes), ("gpusPerNode", size.gpus_per_node))
    entries = [
        stated("apiVersion", API_VERSION, ""),
        stated("kind", "TrainingJob", ""),
        stated("metadata.name", name, "a new job of the same name goes on from the last checkpoint"),
        *([stated("spec.cluster", cluster, "a file in clusters/")] if cluster is not None else []),
        *(stated(f"spec.{field}", number, "") for field, number in counts if number is not None),
        *training,
        stated("spec.restart.maxRestarts", 3, "without a new checkpoint between them"),
    ]
    header = [
        f"The job {name}, from {source}. Behind each value stands the key that it comes from.",
        "Every field there is: docs/reference/trainingjob.md. Check it: lockstep validate, then lockstep plan.",
    ]
    return re.sub(r"\n\n(kind|metadata|spec):", r"\n\1:", write(header, entries))


class _Reader:
    """Turns leaves into fields of spec.training."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.entries: dict[str, Entry] = {}
        """Entry of each field, by its path below spec.training."""
        self.leaves: dict[str, Leaf] = {}
        """Origin of each of them."""
        self.accumulation: Leaf | None = None
        self.leftovers: list[Leftover] = []

    def read(self, leaf: Leaf) -> None:
        """Take in one value: it becomes a field, or a leftover with its reason."""
        path = re.sub(r"\[\d+\]", "", leaf.path)
        key = path.rpartition(".")[2]
        if leaf.value is None and key not in NOTHING and not self._section(path):
            self._leave(leaf, NO_VALUE)
        elif path in DATA_KEYS or key in DATA_KEYS:
            self._volume_path(leaf, "data.path", DATASETS)
        elif key in MODEL_KEYS or path == "model.name":
            self._model(leaf)
        elif key == "gradient_accumulation_steps" and self.accumulation is None:
            self.accumulation = leaf
        else:
            self._field(leaf, path, ALIASES.get(key, key))

    @staticmethod
    def _section(path: str) -> str | None:
        return next((name for name in path.split(".") if name in SECTION_REASONS), None)

    def _field(self, leaf: Leaf, path: str, key: str) -> None:
        section = self._section(path)
        if section is None and key in FIELDS:
            field, read = FIELDS[key]
            try:
                self._set(leaf, field, read(leaf.value))
            except ValueError as error:
                self._leave(leaf, str(error))
        else:
            self._leave(leaf, SECTION_REASONS[section] if section else NOTHING.get(key, UNKNOWN))

    def _set(self, leaf: Leaf, field: str, value: Any, comment: str = "") -> None:
        if field in self.entries:
            self._leave(leaf, f"{field} has its value from {self.entries[field].source.partition(':')[0]}")
        else:
            section = "spec" if field.startswith("hangTimeouts") else TRAINING
            self.entries[field] = stated(f"{section}.{field}", value, comment or leaf.path)
            self.leaves[field] = leaf

    def _leave(self, leaf: Leaf, reason: str) -> None:
        self.leftovers.append(Leftover(leaf.line, f"{leaf.path}: {leaf.value}", reason))

    def _model(self, leaf: Leaf) -> None:
        name = str(leaf.value)
        is_hub_or_store = re.fullmatch(MODEL_PATTERN, name) and not name.startswith("/")
        if is_hub_or_store:
            self._set(leaf, "model.name", name)
        else:
            self._volume_path(leaf, "model.name", f"{WORKSPACE}/models")

    def _volume_path(self, leaf: Leaf, field: str, folder: str) -> None:
        """A path below /workspace or /datasets, or an address, stays; every other file has to be brought there."""
        path = str(leaf.value)
        if path.startswith((f"{WORKSPACE}/", f"{DATASETS}/")) or "://" in path:
            self._set(leaf, field, path)
            return
        there = f"{folder}/{basename(path.rstrip('/'))}"
        self._set(leaf, field, there, f"{leaf.path}: {path}, which only /workspace and /datasets can hold: lockstep cp brings it")

    def finished(self) -> list[Entry]:
        """The entries, with those that follow from several keys."""
        self._batch()
        if "model.quantization" in self.entries:
            stage, why = "Stage2", "quantized weights can't be cut into shards"
        else:
            stage, why = "Stage3", "cuts the model over all ranks, as FSDP's full sharding; Stage2 is faster where it fits one GPU"
        self.entries["zeroStage"] = stated(f"{TRAINING}.zeroStage", stage, why)
        order = ("model", "data", "lora", "precision", "seed", "optimization", "evaluation", "checkpoint", "zeroStage", "hangTimeouts")
        return [entry for _, entry in sorted(self.entries.items(), key=lambda item: order.index(item[0].partition(".")[0]))]

    def _batch(self) -> None:
        """The samples of a step: those of a rank, times what it accumulates, times the ranks."""
        micro = self.entries.get("optimization.microBatchSize")
        if self.accumulation is None and micro is None:
            return
        per_rank, times = 1 if micro is None else int(micro.value), 1
        if self.accumulation is not None:
            try:
                times = _at_least(1, "must be 1 or more")(self.accumulation.value)
            except ValueError as error:
                self._leave(self.accumulation, str(error))
        field, of_rank, ranks = "optimization.globalBatchSize", f"{per_rank} × {times} accumulated", self.size.ranks
        if ranks is None:
            self.entries[field] = left_out(f"{TRAINING}.{field}", per_rank * times, f"{of_rank} × the ranks, whose number is not known")
            if self.accumulation is not None and times > 1:
                self._leave(self.accumulation, f"the number of ranks is not known: state {field} as {per_rank} × {times} × the ranks")
            return
        comment = f"{of_rank} × {ranks} ranks; it stays the same where the number of ranks changes"
        self.entries[field] = stated(f"{TRAINING}.{field}", per_rank * times * ranks, comment)
