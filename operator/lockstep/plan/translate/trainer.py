"""The configuration of another trainer as a job file for Lockstep's: of a LoRA script, LLaMA-Factory, Axolotl, ms-swift, TRL. Text in, text
out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.model import spelled
from lockstep.api.names import API_VERSION, DATASETS, WORKSPACE
from lockstep.api.training import MODEL_PATTERN
from lockstep.plan.discovery.draft import Entry, Item, left_out, stated, write
from lockstep.plan.translate import keys, sources, tools
from lockstep.plan.translate.commands import command_line
from lockstep.plan.translate.leaves import Leaf, Leftover, leaves_of
from lockstep.plan.translate.readers import ALL_LINEAR, AS_SCRIPT, DIFFERS, UNSET, Beside, Moved, OtherTool, To, at_least, is_on, number
from lockstep.plan.translate.sources import DataSets, are_described, is_file, on_volume

TRAINING = "spec.training"
MODEL_KEYS, DATA_KEYS = ([key for key, row in keys.FIELDS.items() if row.field == field] for field in ("model.name", "data.path"))
MODEL_PATHS = ("model", "model.name")
_PLACES = {
    "model.name": f"{WORKSPACE}/models",
    "lora.initFrom": f"{WORKSPACE}/models",
    "data.path": DATASETS,
    "evaluation.data.path": DATASETS,
}
"""Field of a path → folder of the volume where it is brought."""
NO_VALUE = "has no value"
_COMMANDS = ("swift", "megatron", "llamafactory_cli", "axolotl", "trl")
"""Paths of a command's own word, which says nothing more."""
_SHARING = ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size", "tensor_parallel_size")
"""Keys of the ranks that share one sample."""
_MANY = 10000
"""Passes over the data of a job that its steps end."""
_SAID = ("optimization.learningRate", "optimization.epochs", "optimization.schedule", "data.maxLength", "data.trainOn", "lora.rank",
         "lora.alpha", "lora.targetModules")  # fmt: skip
"""Fields that decide what is learned, of which a script of one's own may have another default."""
_FIRST = ("deepspeed", "cosine_min_lr_ratio", "lora_target_linear", "warmup_steps", "max_steps")
"""Keys that count before others of the same field."""
_ORDER = ("env", "model", "method", "data", "lora", "precision", "seed", "optimization", "evaluation", "checkpoint",
          "reportTo", "zeroStage", "hangTimeouts")  # fmt: skip
_SECRET = re.compile(r"(hf|hub|api|access|auth|swanlab|wandb)_?token|api_?key|secret|passw|webhook", re.IGNORECASE)


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


def job_text(text: str, source: str, name: str, cluster: str | None, size: Size, beside: Beside = lambda path: None) -> Translation:
    """The job file of a trainer's configuration, or of its command line in a shell script. `source`: its name; `cluster`: the job's, if it
    names one; `size`: ranks, by which a step's samples are counted; `beside`: reads files that it names.

    Raises ConfigError for a training of another kind, for a file without a model or without data, and for values that no job can have; it
    names the lines of the file.
    """
    named, leaves = command_line(text.removeprefix("\ufeff"), source) or (None, leaves_of(text, source))
    tool = next((tool for tool in tools.TOOLS if tool.name == named), None) or tool_of(leaves, source)
    refuse_other_training(tool, leaves, source, beside)
    reader = _Reader(tool, leaves, source, size, beside)
    for leaf in sorted(leaves, key=lambda leaf: leaf.path.rpartition(".")[2] not in _FIRST):
        reader.read(leaf)
    entries = reader.finished()
    missing = [
        f"{source}: names no {what}: none of its keys has a value: {', '.join(named)}"
        for what, named in (("model", MODEL_KEYS[:4]), ("data", (*DATA_KEYS[:4], "dataset", "datasets", "dataset_name")))
        if not reader.has(what)
    ]
    if missing:
        raise ConfigError(*(f"{source}:{one.line}: {one.what}: {UNSET}" for one in reader.leftovers if one.reason == UNSET), *missing)
    unknown = [one.what.partition(":")[0] for one in reader.leftovers if one.reason == keys.NO_SETTING]
    if tool is tools.SCRIPT and 2 * len(unknown) > len(leaves):
        raise ConfigError(f"{source}: is of a program that isn't known, as most of its keys aren't: {', '.join(unknown[:8])}: {AS_SCRIPT}")
    translation = Translation(
        _written(name, cluster, size, entries, [*reader.header(name)]),
        tuple(sorted(reader.leftovers, key=lambda one: one.line)),
        str(reader.leaves["model.name"].value),
    )
    _check(translation.text, source, reader.leaves)
    return translation


def tool_of(leaves: Sequence[Leaf], source: str) -> OtherTool:
    """Return the tool whose keys a file has most of. Raises ConfigError for a file of a program that isn't translated."""
    paths = {plain(leaf.path) for leaf in leaves}
    present = {prefix for path in paths for prefix in accumulate(path.split("."), lambda a, b: f"{a}.{b}")}
    for marks, program in tools.PROGRAMS:
        if len(present & set(marks)) >= min(2, len(marks)):
            taken = ", ".join(f"{field}: {value}" for field, value, _ in tools.zero_of(leaves, source))
            of_this = f"; of this one a job takes {taken}" if taken else ""
            raise ConfigError(f"{source}: is a file of {program}; it is not translated: {AS_SCRIPT}{of_this}")
    counts = {tool.name: len(present & {*tool.marks.split()}) * (not tool.needs or tool.needs in present) for tool in tools.TOOLS}
    best = max(tools.TOOLS, key=lambda tool: counts[tool.name])
    is_sure = best is tools.TRL and present.isdisjoint(("dataset", *DATA_KEYS))  # TRL's files have dataset_name, and often little else
    return best if counts[best.name] > (not is_sure) else tools.SCRIPT


def refuse_other_training(tool: OtherTool, leaves: Sequence[Leaf], source: str, beside: Beside = lambda path: None) -> None:
    """Raise ConfigError for a training that isn't Lockstep's, by its name."""
    by_key: dict[str, Leaf] = {}
    for leaf in leaves:
        path = plain(leaf.path)
        last = path.rpartition(".")[2]
        by_key.setdefault(path, leaf)
        by_key.setdefault(path.partition(".")[0], leaf)
        if tool in (tools.SCRIPT, tools.TRL) or last.isupper():
            by_key.setdefault(last.lower() if last.isupper() else last, leaf)
    asked: dict[str, dict[str, str]] = {}
    for training, words in (*keys.OTHERS, *tool.refused):
        for key, _, value in (word.partition("=") for word in words.split()):
            asked.setdefault(key, {})[value or "*"] = training
    for key, cases in asked.items():
        asks = by_key.get(key)
        if asks is not None and (other := cases.get(str(asks.value).lower(), cases.get("*") if is_on(asks.value) else None)):
            raise tool.refusal(asks, source, other)
    for leaf in leaves:
        if _names_model(plain(leaf.path)) and (other := sources.other_model(str(leaf.value))):
            raise tool.refusal(leaf, source, other)
    told = [beside(str(path)) for leaf in leaves if _names_data(tool, leaf.path) for path in _listed(leaf.value)]
    rows = "\n".join(text for text in told if text)
    named = next((leaf for leaf in leaves if _names_data(tool, leaf.path)), leaves[0])
    if other := sources.training_of_rows(rows):
        raise tool.refusal(named, source, f"{other}, by its rows")
    seen = next((by_key[key] for key in tool.seen if key in by_key and sources.sees(by_key[key].value)), None)
    program = by_key.get("launcher")
    if seen is None and program is not None and sources.sees(str(program.value).replace("/", " ")):
        seen = program
    if seen is not None and not all(told or [""]) and "dataset_path" not in by_key and not are_described(tool, by_key, beside):
        other = f"{keys.PICTURES} (where all samples are text, name their file instead: dataset_path: /datasets/FILE)"
        raise tool.refusal(seen, source, other)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _names_model(path: str) -> bool:
    return path.rpartition(".")[2] in MODEL_KEYS or path in MODEL_PATHS


def _names_data(tool: OtherTool, path: str) -> bool:
    """Tell a key whose value is a file of samples, or a list of them."""
    return plain(path) in (*DATA_KEYS, *tool.datasets, *(f"{key}.{last}" for key in tool.lists for last in ("path", "data_files")))


def plain(path: str) -> str:
    """A path without the numbers of list entries."""
    return re.sub(r"\[\d+\]", "", path)


def _check(text: str, source: str, origins: Mapping[str, Leaf]) -> None:
    """Raise ConfigError for values that no job can have, with the line and the key that each came from."""
    try:
        parse_job_file(text, "job")
    except ConfigError as error:
        lines = []
        for line in map(str, error.args):
            place, _, problem = re.sub(r"^job:\d+: ", "", line).partition(": ")
            field = plain(place.removeprefix("spec.").removeprefix("training."))
            leaf = next((origins[key] for key in (field, *(key for key in origins if key.startswith(field))) if key in origins), None)
            lines.append(
                f"{source}:{leaf.line}: {leaf.path}: {leaf.value}: {place}: {problem}" if leaf else f"{source}: {place}: {problem}"
            )
        raise ConfigError(*lines) from None


def _written(name: str, cluster: str | None, size: Size, training: Sequence[Entry], header: Sequence[str]) -> str:
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
    return re.sub(r"\n\n(kind|metadata|spec):", r"\n\1:", write(header, entries))


class _Reader:
    """Turns leaves into fields of spec.training."""

    def __init__(self, tool: OtherTool, leaves: Sequence[Leaf], source: str, size: Size, beside: Beside) -> None:
        self.tool = tool
        self.all = leaves
        self.keys = {**keys.FIELDS, **tool.keys}
        self.values = {plain(leaf.path): leaf.value for leaf in leaves}
        self.source = source
        self.size = size
        self.beside = beside
        self.entries: dict[str, Entry] = {}
        """Entry of each field, by its path below spec.training."""
        self.leaves: dict[str, Leaf] = {}
        """Origin of each of them."""
        self.accumulation: Leaf | None = None
        self.lowest: Leaf | None = None
        """The rate at the end."""
        self.leftovers: list[Leftover] = []
        self.assumed: list[str] = []
        """Sentences on what the translation assumes, and the file doesn't say."""
        self.failed: dict[str, Leaf] = {}
        """Field → the key whose value it can't have."""
        self.sets = DataSets(tool, leaves, source, beside, self._leave)
        self.method = "Full" if tool.is_full(self.values) else "LoRA"
        self._state("method", self.method, "trains every weight" if self.method == "Full" else "trains an adapter")

    def has(self, section: str) -> bool:
        """Tell whether the model, or the data, is named."""
        return any(f"{section}.{key}" in self.entries for key in ("name", "path", "sources"))

    def read(self, leaf: Leaf) -> None:
        """Take in one value: it becomes a field, or a leftover with its reason."""
        path = plain(leaf.path)
        key = path.rpartition(".")[2]
        row = self.keys["base_model"] if path in MODEL_PATHS else self._row(path, leaf.value)
        text = leaf.value if isinstance(leaf.value, str) else ""
        named = text.rpartition("/")[2] if isinstance(row, To) and row.field in _PLACES else text
        if leaf.path in self.sets.consumed or leaf.path in _COMMANDS:
            if (leaf.path, text) == ("swift", "pt"):
                self._set(leaf, "data.trainOn", "All", "swift pt")
        elif leaf.value is None:
            self._leave(leaf, NO_VALUE)
        elif re.search(r"\$\{?\w|\$\(", named) and path != "launcher":
            self._leave(leaf, UNSET)
        elif key in keys.ACCUMULATIONS.split() and self.accumulation is None:
            self.accumulation = leaf
        elif key in ("min_lr", "eta_min") and is_on(leaf.value):
            self.lowest = leaf
        elif key in keys.TOKENIZERS.split() and text in (value for path, value in self.values.items() if _names_model(path)):
            self._leave(leaf, "the tokenizer is the model's own")
        elif path == "deepspeed" and text:
            self._deepspeed(leaf)
        else:
            self._field(leaf, row)

    def _row(self, path: str, value: Any) -> To | str:
        """Return what a key means: by its path, by its end, by the variable of that name."""
        settings = path.removeprefix("deepspeed.")
        last = path.rpartition(".")[2]
        ends = [settings] if settings != path else [path, ".".join(path.split(".")[-2:]), last, *([last.lower()] if last.isupper() else [])]
        row = next((self.keys[end] for end in ends if end in self.keys), keys.left_out(path, value))
        return f"{DIFFERS}{row}" if row in keys.ELSEWHERE and self.tool is tools.SCRIPT and is_on(value) else row

    def _field(self, leaf: Leaf, row: To | str) -> None:
        try:
            value = row if isinstance(row, str) else row.read(leaf.value)
        except ValueError as error:
            self._leave(leaf, str(error))
            if isinstance(row, To):
                self.failed.setdefault(row.field, leaf)
            return
        if isinstance(row, str):
            self._leave(leaf, row)
        elif isinstance(row, To) and row.field == f"data.columns.{value}":
            self._leave(leaf, "rows are read by that name anyway")
        elif isinstance(value, Moved):
            self._set(leaf, value.field, value.value, f"{leaf.path}: {leaf.value}, {value.note}")
        else:
            place, _, end = row.field.rpartition(".")
            is_hub = "/" in str(value) or end == "name"
            if place.endswith("data") and end in ("name", "path"):
                end = "name" if is_hub and not is_file(str(value), self.beside) else "path"
            self._set_place(leaf, f"{place}.{end}".lstrip("."), value)

    def _set_place(self, leaf: Leaf, field: str, value: Any) -> None:
        """Bring a path to its volume; a model's name of the hub, and other values, stay."""
        is_hub = re.fullmatch(MODEL_PATTERN, str(value)) and ("://" in str(value) or not is_file(str(value)))
        if field not in _PLACES or (field == "model.name" and is_hub):
            self._set(leaf, field, value)
        else:
            there, note = on_volume(str(value), _PLACES[field])
            self._set(leaf, field, there, f"{leaf.path}: {note}" if note else "")

    def _state(self, field: str, value: Any, comment: str) -> None:
        section = "spec" if field.startswith(("hangTimeouts", "env")) else TRAINING
        self.entries[field] = stated(f"{section}.{field}", value, comment)

    def _set(self, leaf: Leaf, field: str, value: Any, comment: str = "") -> None:
        if self.method == "Full" and field.startswith(("lora.", "model.quantization")):
            self._leave(leaf, "every weight is trained (method: Full), and none is an adapter's")
        elif field in ("env", "reportTo") and field in self.entries:
            former = self.entries[field]
            self._state(field, [*former.value, *(one for one in value if one not in former.value)], former.source)
        else:
            self._put(leaf, field, value, comment)

    def _put(self, leaf: Leaf, field: str, value: Any, comment: str = "") -> None:
        if field in self.entries:
            self._leave(leaf, f"{field} has its value from {self.entries[field].source.partition(':')[0]}")
        else:
            self._state(field, value, comment or leaf.path)
            self.leaves[field] = leaf

    def _leave(self, leaf: Leaf, reason: str) -> None:
        value = "…" if _SECRET.search(leaf.path) and isinstance(leaf.value, str) else leaf.value
        self.leftovers.append(Leftover(leaf.line, f"{leaf.path}: {value}", reason))

    def _drop(self, field: str, reason: str) -> None:
        self.entries.pop(field)
        self._leave(self.leaves.pop(field), reason)

    def _deepspeed(self, leaf: Leaf) -> None:
        settings = list(tools.zero_beside(str(leaf.value), self.beside))
        for field, value, why in settings:
            self._set(leaf, field, value, f"{leaf.path}: {leaf.value}, {why}")
        if not settings:
            self._leave(leaf, keys.DEEPSPEED)

    def finished(self) -> list[Entry]:
        """The entries, with those that follow from several keys."""
        self._data()
        self._evaluation()
        self._rates()
        self._defaults()
        self._batch()
        self._stage()
        self._assume()
        return [entry for _, entry in sorted(self.entries.items(), key=lambda item: _ORDER.index(item[0].partition(".")[0]))]

    def header(self, name: str) -> Iterator[str]:
        """Yield what stands above the job: where it comes from, and all that was assumed or that the job doesn't have."""
        kind = "" if self.tool is tools.SCRIPT else f", read as {self.tool.name}'s"
        yield f"The job {name}, from {self.source}{kind}. Behind each value stands the key that it comes from."
        yield "Every field there is: docs/reference/trainingjob.md. Check it: lockstep validate, then lockstep plan."
        yield from self.assumed
        for what, reason in (
            ("The result may differ, since the job doesn't have", DIFFERS),
            ("Not known, and not in the job", keys.NO_SETTING),
        ):
            if listed := [one.what.partition(":")[0] for one in self.leftovers if one.reason.startswith(reason)]:
                yield f"{what}: {', '.join(listed)}"

    def _data(self) -> None:
        """One source as data.path or data.name, several as data.sources; the first to evaluate as evaluation.data."""
        for source in self.sets.held[1:]:
            self._leave(source.leaf, "evaluation.data is one source of samples")
        mapped = [self.entries.pop(field) for field in [*self.entries] if field.startswith("data.columns.")]
        columns = {entry.key.rpartition(".")[2]: entry.value for entry in mapped}
        whence = ", ".join(entry.source for entry in mapped)
        made = sources.apart([(one, *one.fields(self.source, self.beside)) for one in (*self.sets.train, *self.sets.held[:1])])
        for field, several in (("data", made[: len(self.sets.train)]), ("evaluation.data", made[len(self.sets.train) :])):
            for source, fields, _ in several:
                fields.update({"columns": {**columns, **source.columns}} if columns else {})
            if not several and columns and any(f"{field}.{key}" in self.entries for key in ("path", "name")):
                self._state(f"{field}.columns", columns, whence)
            if len(several) > 1 or any(source.weight is not None for source, _, _ in several):
                items = [Item(fields, note or source.leaf.path) for source, fields, note in several]
                self._put(several[0][0].leaf, f"{field}.sources", items)
                continue
            for source, fields, note in several:
                for key, value in fields.items():
                    comment = f"{source.leaf.path}: {note}" if note and key in ("path", "name") else ""
                    self._put(source.leaf, f"{field}.{key}", value, comment)
        if self.tool is tools.AXOLOTL and "completion" in (leaf.value for leaf in self.all if leaf.path.endswith("].type")):
            self.entries.setdefault("data.overlong", stated(f"{TRAINING}.data.overlong", "Split", "type: completion cuts long texts"))

    def _evaluation(self) -> None:
        """Evaluation is only there where something is held out: Lockstep would hold out samples for it."""
        strategy = str(self.values.get("eval_strategy", self.values.get("evaluation_strategy"))).lower()
        if "evaluation.data.split" in self.entries and not self.has("evaluation.data"):
            if "data.name" in self.entries and strategy in ("steps", "epoch"):
                for key in ("name", "config", "columns"):
                    if entry := self.entries.get(f"data.{key}"):
                        self._state(f"evaluation.data.{key}", entry.value, entry.source)
            else:
                self._drop("evaluation.data.split", "nothing is evaluated")
        if "evaluation.holdout" in self.leaves and self.has("evaluation.data"):
            self._drop("evaluation.holdout", "evaluation.data names the samples to evaluate")
        fields = [field for field in self.entries if field.startswith("evaluation.")]
        if (self.tool is not tools.SCRIPT and fields == ["evaluation.everySteps"]) or strategy in ("no", "false"):
            for field in fields:
                self._drop(field, "nothing is evaluated: no samples are held out for it")

    def _rates(self) -> None:
        """Settings of the schedule that depend on each other."""
        schedule = self.leaves.get("optimization.schedule")
        if schedule is not None and str(schedule.value).lower() == "constant" and "optimization.warmupSteps" in self.entries:
            self._drop("optimization.warmupSteps", f"the schedule constant has no warm-up in {self.tool.name}")
        rate = float(self.entries["optimization.learningRate"].value) if "optimization.learningRate" in self.entries else 0
        if self.lowest is not None:
            try:
                ratio = spelled(float(f"{float(number(self.lowest.value)) / rate:.6g}"))
            except (ValueError, ZeroDivisionError):
                self._leave(self.lowest, keys.left_out(self.lowest.path))
            else:
                comment = f"{self.lowest.path}: {self.lowest.value}, divided by the learning rate"
                self._put(self.lowest, "optimization.minLearningRateRatio", ratio, comment)
        if (steps := self.entries.get("optimization.maxSteps")) is not None:
            if passes := self.leaves.pop("optimization.epochs", None):
                self._leave(passes, f"optimization.maxSteps has {steps.source}, which ends the training in any pass")
            self._state("optimization.epochs", _MANY, "optimization.maxSteps ends it")

    def _defaults(self) -> None:
        """Fields where the tool's default isn't Lockstep's, and those that follow from the model."""
        for field, value in self.tool.defaults.items():
            if field not in self.entries and not (field.startswith("lora.") and self.method == "Full"):
                chosen = value[self.method] if isinstance(value, dict) else value
                if chosen == tools.DOUBLE_RANK:
                    chosen = 2 * int(self.entries["lora.rank"].value)
                unread = self.failed.get(field)
                self._state(field, chosen, f"instead of {unread.path}: {unread.value}" if unread else f"the default of {self.tool.name}")
        for key, reason in self.tool.unset.items():
            if key not in self.values:
                self.leftovers.append(Leftover(self.all[0].line, key, reason))
        if self.tool is not tools.SCRIPT and self.values.get("bf16") is False and not is_on(self.values.get("fp16")):
            self.entries.setdefault("precision", stated(f"{TRAINING}.precision", "FP32", "bf16: false"))
        model = str(self.entries["model.name"].value) if "model.name" in self.entries else "/"
        if "model.revision" in self.entries and model.startswith("/"):
            self._drop("model.revision", "a folder has no revisions")
        targets = self.entries.get("lora.targetModules")
        if targets is not None and targets.value == ALL_LINEAR:
            usual = f"all linear layers, as models such as {model.rpartition('/')[2]} name them; the trainer lists the names that there are"
            self._state("lora.targetModules", [Item(layer) for layer in sources.linear_layers(model)], f"{targets.source}: {usual}")

    def _assume(self) -> None:
        """Say what is assumed where the file says nothing."""
        model, learned = self.leaves.get("model.name"), self.entries.get("data.trainOn")
        if model is not None and "dataset_path" not in self.values and (said := sources.assumed_of_model(str(model.value))):
            self.assumed.append(f"Assumed: {said}.")
        if self.tool is tools.TRL and learned is not None and learned.source.startswith("the default"):
            self.assumed.append(
                "Assumed: rows are messages or text, which TRL learns whole. Remove trainOn for rows with prompt and completion."
            )
        if self.tool not in (tools.SCRIPT, tools.TRL):
            return
        if self.method == "Full" and not any(path.rpartition(".")[2] in tools.SWITCHES for path in self.values):
            self.assumed.append(f"Assumed: every weight is trained, since no key of {self.source} is an adapter's.")
        lacking = [field for field in _SAID if field not in self.entries and (self.method == "LoRA" or not field.startswith("lora."))]
        if lacking and self.tool is tools.SCRIPT:
            self.assumed.append(f"Lockstep's own defaults, since {self.source} has no key for them: {', '.join(lacking)}")

    def _batch(self) -> None:
        """The samples of a step: those of a rank, times what it accumulates, times the ranks."""
        micro, field = self.entries.get("optimization.microBatchSize"), "optimization.globalBatchSize"
        if field in self.entries:
            if self.accumulation is not None:
                self._leave(self.accumulation, f"{field} counts it")
            return
        if self.accumulation is None and micro is None and not self.tool.least:
            return
        per_rank = 1 if micro is None else max(int(micro.value), 1)
        shared = prod(int(self.values[key]) for key in _SHARING if str(self.values.get(key, "")).isdigit() and self.values[key])
        ranks = None if self.size.ranks is None else max(self.size.ranks // shared, 1)
        times = self._times(per_rank, ranks)
        of_rank = f"{per_rank} × {times} accumulated"
        if ranks is None:
            self.entries[field] = left_out(f"{TRAINING}.{field}", per_rank * times, f"{of_rank} × the ranks, whose number is not known")
            if self.accumulation is not None and times > 1:
                self._leave(self.accumulation, f"the number of ranks is not known: state {field} as {per_rank} × {times} × the ranks")
            return
        several = f"{ranks} groups of {shared} ranks that share samples there" if shared > 1 else f"{ranks} ranks"
        self._state(field, per_rank * times * ranks, f"{of_rank} × {several}; it stays the same where the number of ranks changes")

    def _times(self, per_rank: int, ranks: int | None) -> int:
        """Micro-batches that a rank accumulates."""
        if self.accumulation is not None:
            try:
                return at_least(1, "must be 1 or more")(self.accumulation.value)
            except ValueError as error:
                self._leave(self.accumulation, str(error))
        elif self.tool is tools.AXOLOTL and is_on(self.values.get("batch_size")):
            return max(int(self.values["batch_size"]) // per_rank, 1)
        elif ranks is not None:
            return max(ceil(self.tool.least / (per_rank * ranks)), 1)
        return 1

    def _stage(self) -> None:
        stage, why = "Stage3", "cuts the model over all ranks, as FSDP's full sharding; Stage2 is faster where it fits one GPU"
        if "model.quantization" in self.entries and self.entries["model.quantization"].value == "NF4":
            stage, why = "Stage2", "quantized weights can't be cut into shards"
            if "zeroStage" in self.leaves and self.entries["zeroStage"].value == "Stage3":
                self._drop("zeroStage", why)
        self.entries.setdefault("zeroStage", stated(f"{TRAINING}.zeroStage", stage, why))
