"""The run's dataset: sources read and tokenized, divided, cut, packed, once on every volume. All of it is kept on disk; a later start only
maps it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_spec.codec import from_json, to_json
from lockstep_spec.modelnames import is_address
from lockstep_spec.training import DataConfig, EvaluationConfig, SamplesConfig
from lockstep_train.base.arrays import open_arrays, whole_arrays
from lockstep_train.base.cache import cache_folder, file_hash, stamp
from lockstep_train.base.errors import ConfigError, TrainerError, refusal
from lockstep_train.base.limits import UNWATCHED, Say, Watch
from lockstep_train.base.ranks import Ranks, refused_together
from lockstep_train.base.runfile import RunConfig
from lockstep_train.base.volumes import BuildProgress, once_per_volume
from lockstep_train.data.read.files import DataFiles, DataSource, is_several, local_files
from lockstep_train.data.read.records import AnySample
from lockstep_train.data.read.remote import RemoteSource, agreed_commits, at_commits, hub_dataset, remember_commits, remote_name
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.sequences.divide import DivisionRule, divide
from lockstep_train.data.sequences.sequences import CONTENT as PLAN_CONTENT
from lockstep_train.data.sequences.sequences import Sequences, write_sequences
from lockstep_train.data.tokens.source import CONTENT, token_key, tokens_of, with_source_name
from lockstep_train.data.tokens.tokenizer import Tokenizer
from lockstep_train.data.tokens.turns import TemplateChoice

VERSION = 1
"""Raised when the same tokens would give other sequences."""
TRAINING, EVALUATION = "training", "evaluation"
SEQUENCE_SETTINGS = ("columns", "overlong", "trainOn", "packing", "onBroken", "chatTemplate", "chatTemplateKwargs")

Digest = Callable[[Path, Path], str]


@dataclass(frozen=True)
class Prepared:
    """Places of everything on this volume, and the notes about it. Sent from the rank that made it to the others."""

    tokens: tuple[str, ...]
    """Folders, one a source."""
    names: tuple[str, ...]
    plan: str
    notes: tuple[str, ...]
    digest: str
    files: dict[str, str]
    """Each path, and each hub dataset with its commit → the SHA-256 of its content."""
    chats: bool
    """Some rows to train on are conversations."""


@dataclass(frozen=True)
class Dataset:
    training: Sequences
    evaluation: Sequences
    digest: str
    """SHA-256 over the training tokens, their masks and their division into sequences: another one means that a data cursor has
    no meaning."""
    notes: tuple[str, ...]
    """Lines to print at the start."""
    files: dict[str, str] = field(default_factory=dict)
    """Each path, and each hub dataset with its commit → the SHA-256 of its content."""
    largest_id: int = 0
    """Largest id of all tokens, those before every text among them."""
    chats: bool = False
    """Some rows to train on are conversations."""


def sequence_settings(data: DataConfig, evaluation: EvaluationConfig | None) -> dict[str, Any]:
    """Settings that decide what a sequence is; those at their defaults are left out. With these a refusal can say what was
    changed, where the digest alone could only say that something was."""
    stated, default = to_json(data), to_json(DataConfig(max_length=data.max_length))
    changed = [key for key in SEQUENCE_SETTINGS if stated[key] and stated[key] != default[key]]
    settings: dict[str, Any] = {f"data.{key}": stated[key] for key in ("maxLength", *changed)}
    if data.sources:
        settings["data.sources"] = [f"{source.path or source.name} × {source.weight:g}" for source in data.sources]
    if evaluation is not None and evaluation.data is None:
        settings["evaluation.holdout"] = evaluation.holdout
    return settings


def sources_of(data: DataConfig) -> Sequence[SamplesConfig]:
    return data.sources or (data,)


def content_digest(path: Path, cache: Path) -> str:
    """SHA-256 of a data file, by `file_hash`. Raises ConfigError when it can't be read, TrainerError when it can't be read now."""
    try:
        return file_hash(path, cache)
    except OSError as error:
        raise refusal(f"the data {path} can't be read: {error.strerror}", error) from error


def resolve_source(source: SamplesConfig, cache: Path, say: Say, digest: Digest = content_digest) -> DataSource:
    """Find a source's samples. Raises ConfigError when it isn't there, or no format is stated and its own is none that can be read."""
    if source.path is None or remote_name(source) is not None:
        return hub_dataset(source, cache, say)
    files = local_files(source, say)
    before = _stamps(files)
    content = files.digest(lambda path: digest(path, cache))

    def samples(broken: Broken) -> Iterator[AnySample]:
        yield from files.samples(broken)
        if _stamps(files) != before and files.digest(lambda path: digest(path, cache)) != content:
            raise TrainerError(
                f"the data {source.path} changed while it was read; the next attempt reads it again, so stop what writes there"
            )

    return DataSource(source.path, content, files.plain_text, source.weight, samples, source.path)


def _stamps(files: DataFiles) -> list[list[int]]:
    """Stamps that change with the files. Raises ConfigError, or TrainerError for a volume that may answer later."""
    try:
        return [stamp(path) for path in files.paths]
    except OSError as error:
        raise refusal(f"the data {error.filename} can't be read: {error.strerror}", error) from error


def template_choice(data: DataConfig) -> TemplateChoice:
    """Chat template that a run states."""
    return TemplateChoice(data.chat_template, data.chat_template_kwargs or {})


def refuse_unreadable(field: str, path: str | None) -> None:
    """Raise ConfigError naming the setting whose file can't be opened."""
    try:
        if path is not None and not is_address(path) and not is_several(Path(path)):
            Path(path).open("rb").close()
    except OSError as error:
        raise refusal(f"{field} {path} can't be read: {error.strerror}; every node must see the file there", error) from error


def prepare(data: DataConfig, evaluation: EvaluationConfig | None, tokenizer: Tokenizer, cache: Path, say: Say) -> Prepared:
    """Make on this volume whatever isn't there yet, and check what is. Raises ConfigError."""
    if data.max_length <= len(tokenizer.begin):
        raise ConfigError(
            f"training.data.maxLength = {data.max_length} leaves no room for text after the {len(tokenizer.begin)} tokens this model"
            " expects before it"
        )
    configs = list(sources_of(data))
    fields = [f"training.data.sources[{index}].path" for index in range(len(configs))] if data.sources else ["training.data.path"]
    if evaluation is not None and evaluation.data is not None:
        configs.append(evaluation.data)
        fields.append("training.evaluation.data.path")
    for setting, config in zip(fields, configs, strict=True):
        refuse_unreadable(setting, config.path)
    sources = [resolve_source(config, cache, say) for config in configs]
    tokens = [tokens_of(source, tokenizer, data.train_on, cache / "tokens", say, data.on_broken) for source in sources]
    rule = DivisionRule(data.max_length, data.overlong, data.packing, len(tokenizer.begin), evaluation)
    described = [[source.name, token_key(source, tokenizer, data.train_on, data.on_broken), source.weight] for source in sources]
    facts = [VERSION, described, _plain(rule)]
    plan = cache / "plans" / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    if not _whole(plan, say):
        divided = divide(sources, tokens, rule)
        capacity = data.max_length if data.packing else None
        write_sequences(divided.evaluation, capacity, plan / EVALUATION, {})
        write_sequences(divided.training, capacity, plan / TRAINING, {"notes": divided.notes})
    training = open_arrays(plan / TRAINING, verify=False)
    trained = tokens[: len(tokens) - rule.own_file]
    contents = [training.digest(*PLAN_CONTENT), *(arrays.digest(*CONTENT) for arrays in trained)]
    source_notes = [
        note for source, arrays in zip(sources, tokens, strict=True) for note in with_source_name(arrays.facts["notes"], source)
    ]
    return Prepared(
        tokens=tuple(str(arrays.folder) for arrays in tokens),
        names=tuple(source.name for source in sources),
        plan=str(plan),
        notes=(*training.facts["notes"], *source_notes, *packing_note(training.facts, data)),
        digest=hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
        files={source.pinned: source.digest for source in reversed(sources)},  # where evaluation is of another split, training's counts
        chats=any(arrays.facts["chats"] for arrays in trained),
    )


def _plain(rule: DivisionRule) -> list[Any]:
    evaluation = rule.evaluation
    chosen = None if evaluation is None else [evaluation.data is None, evaluation.holdout, evaluation.samples]
    return [rule.max_length, rule.overlong.value, rule.packing, rule.prefix, chosen]


def _whole(plan: Path, say: Say) -> bool:
    """Return True if both parts of the plan are there; a damaged one is removed."""
    parts = [
        whole_arrays(plan / part, lambda problem: say(f"Rebuilding the plan of the sequences: {problem}"))
        for part in (EVALUATION, TRAINING)
    ]
    return all(part is not None for part in parts)


def packing_note(facts: dict[str, Any], data: DataConfig) -> list[str]:
    if not data.packing:
        return []
    share = facts["tokens"] / (facts["sequences"] * data.max_length)
    return [f"Packed {facts['documents']:,} documents into {facts['sequences']:,} sequences of {data.max_length} tokens, {share:.1%} full"]


def open_dataset(prepared: Prepared, tokenizer: Tokenizer) -> Dataset:
    """Map what `prepare` made, on any rank of the volume."""
    tokens = [open_arrays(Path(folder), verify=False) for folder in prepared.tokens]
    plan = Path(prepared.plan)
    training, evaluation = (
        Sequences(open_arrays(plan / part, verify=False), tokens, prepared.names, tokenizer.begin) for part in (TRAINING, EVALUATION)
    )
    largest = max(*(arrays.facts["largest"] for arrays in tokens), *tokenizer.begin, 0)
    return Dataset(training, evaluation, prepared.digest, prepared.notes, prepared.files, largest, prepared.chats)


def refuse_unknown_tokens(dataset: Dataset, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where the model's embedding has no row for a token: that would end a rank inside a kernel, with no word of why."""
    largest, size = dataset.largest_id, tokenizer.vocabulary
    if size is not None and largest >= size:
        raise ConfigError(
            f"the tokenizer gives the token {largest} ({tokenizer.decode([largest])!r}), but the model has only those below {size}"
            " (vocab_size of its config.json); take the tokenizer that belongs to the model, or save the model with its embeddings resized"
            " for this one"
        )


def load_dataset(config: RunConfig, tokenizer: Tokenizer, ranks: Ranks, say: Say, watch: Watch = UNWATCHED) -> Dataset:
    """Load the same dataset on every rank. Raises, on all of them alike, ConfigError when it can't be used or differs between volumes, and
    TrainerError for a fault that may pass."""
    with refused_together(ranks, "data"):
        dataset = _loaded(config, tokenizer, ranks, say, watch)
        refuse_unknown_tokens(dataset, tokenizer)
    return dataset


def _loaded(config: RunConfig, tokenizer: Tokenizer, ranks: Ranks, say: Say, watch: Watch) -> Dataset:
    cache = cache_folder(config.run_dir)
    commits = agreed_commits(config, ranks, cache, say)
    progress = BuildProgress(ranks, watch, say)

    def prepared_here() -> Any:
        return to_json(prepare_here(config, commits, tokenizer, cache, progress.report))

    prepared, own = once_per_volume(ranks, cache, "data", progress, prepared_here)
    refuse_other_data(prepared)
    return open_dataset(from_json(Prepared, own, "prepared"), tokenizer)


def prepare_here(config: RunConfig, commits: Mapping[RemoteSource, str], tokenizer: Tokenizer, cache: Path, say: Say) -> Prepared:
    """Prepare the data on this volume, at these commits. Raises ConfigError, or TrainerError for a fault that may pass."""
    training = at_commits(config, commits).training
    try:
        remember_commits(commits, config.run_dir, cache)
        return prepare(training.data, training.evaluation, tokenizer, cache, say)
    except OSError as error:
        message = f"the data can't be prepared in {cache}: {error}; the folder must be writable and have room for 5 bytes a token"
        raise refusal(message, error) from error


def refuse_other_data(prepared: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ConfigError unless all volumes hold the same data. `prepared`: builder's node → Prepared, as JSON."""
    if len({each["digest"] for each in prepared.values()}) > 1:
        files = {node: each["files"] for node, each in prepared.items()}
        first = next(iter(files.values()))
        other = next(((path, node) for node, theirs in files.items() for path in first if theirs.get(path) != first[path]), None)
        which = f"{other[0]} of node {other[1]} differs from that of node {next(iter(files))}; " if other is not None else ""
        raise ConfigError(
            f"the data differs between the volumes of nodes {', '.join(map(str, prepared))}: {which}copy the same files to all of them"
        )
