"""A TrainingJob from YAML or JSON text and `--set training.lora.rank=8`; errors name the line of every mistake. Text in, job out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.problems import broken_rules, explain, unknown
from lockstep.api.job import TrainingJob
from lockstep.api.names import API_VERSION

KIND = "TrainingJob"
ROOT_FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")
_PART = re.compile(r"([^.\[\]]+)((?:\[\d+\])*)")
CHANGED_ROOTS = ("spec", "metadata")
_PREFLIGHT = "must be one word: Auto, Full (the self-test and the all-reduce always), Basic (without these two) or None (no checks)"
REPLACED = {
    "spec.training.model.quantization=Int8": "Int8 is not valid; NF4 packs the base weights, and None leaves them as they are",
    "spec.fabric.ncclEnv": "unknown field; spec.env takes NCCL's variables, and they go before the cluster's",
    "spec.interactive": (
        "unknown field; spec.idleSeconds says when GPUs are released, half an hour after a warning, and lockstep resume raises"
        " spec.restart.retry"
    ),
    "spec.envFrom.prefix": "unknown field; name single keys by spec.env[].valueFrom to give them other names",
    "spec.podTemplate.topologySpreadConstraints": "unknown field; with nodes.rack_label in the cluster file, pods prefer one rack",
    "spec.podTemplate.volumes.emptyDir.sizeLimit": "unknown field; leave it out: an emptyDir may fill the node's ephemeral storage",
    "spec.preflight={}": _PREFLIGHT,
    "spec.preflight=Off": _PREFLIGHT,
    "spec.preflight=False": _PREFLIGHT,
    "spec.training.limits": "unknown field; spec.hangTimeouts has stepSeconds and collectiveSeconds",
    "spec.training.metrics": (
        "unknown field; training.reportTo lists TensorBoard, MLflow and WandB; their addresses and projects are variables in spec.env,"
        " such as MLFLOW_TRACKING_URI and WANDB_PROJECT"
    ),
    "spec.training.checkpoint.exportAdapter": "unknown field; lockstep adapter get makes an adapter of the newest checkpoint's shards",
    "spec.training.optimization.warmupRatio": "unknown field; warmupSteps takes the part of all steps, too, such as 0.03",
    "spec.training.optimization.optimizer": "unknown field; leave it out: the optimizer is torch's AdamW",
    "spec.training.optimization.gradientCheckpointing": "unknown field; optimization.recompute (Auto, None or All) decides this now",
    "spec.notify": (
        "unknown field; the alert LockstepJobFailed (docs/how-to/monitoring.md) tells of a job that failed by Alertmanager's receivers"
    ),
}
"""Path of a field, or of a field and its value (a mapping: {}), that was replaced → what to write instead."""


class NoJob(ConfigError):
    """A file of other objects, or of none."""


def parse_job_file(text: str, source: str, changes: Sequence[str] = ()) -> TrainingJob:
    """Read the one TrainingJob of a file; other objects beside it are left alone. `source` is its name in messages.

    `changes`: fields set elsewhere (`training.lora.rank=8`), which count instead of the file's.

    What the API server would refuse is refused here: the types are strict, and names in snake_case are unknown.

    Raises ConfigError with one line for every problem: file, line, field, what is valid and the nearest valid field.
    """
    jobs = job_nodes(text, source)
    if len(jobs) > 1:
        lines = ", ".join(str(nodes.line_of(job)) for job in jobs)
        raise ConfigError(f"{source}: holds {len(jobs)} objects of kind TrainingJob (lines {lines}); must hold exactly one")
    return read_job(jobs[0], source, changes)


def read_job(node: yaml.MappingNode, source: str, changes: Sequence[str] = ()) -> TrainingJob:
    """The TrainingJob of one document, as parse_job_file reads it. Raises ConfigError as that does."""
    reader = _Reader(source, nodes.line_of(node))
    value = reader.mapping(node, "")
    reader.changes = with_changes(value, changes)
    for field in value.keys() - set(ROOT_FIELDS):
        reader.report(field, unknown(field, ROOT_FIELDS, "unknown field"))
    if value.get("apiVersion") != API_VERSION:
        reader.report("apiVersion", f"must be {API_VERSION}")
    job = reader.job(value | {"apiVersion": API_VERSION})
    if job is None or reader.problems.entries:
        raise reader.problems.error()
    return job


def job_nodes(text: str, source: str) -> list[yaml.MappingNode]:
    """The TrainingJobs among a file's documents, at least one. Raises ConfigError when there is none, or the text is no YAML."""
    documents = nodes.documents(text, source)
    for node in documents:
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{source}:{nodes.line_of(node)}: must be a mapping with apiVersion, kind, metadata and spec")
    kinds = [(_kind(node), node) for node in documents if isinstance(node, yaml.MappingNode)]
    jobs = [node for kind, node in kinds if kind == KIND]
    if not jobs:
        content = f"holds {', '.join(kind or 'an object without kind' for kind, _ in kinds)}" if kinds else "is empty"
        raise NoJob(f"{source}: {content}; must hold one object of kind TrainingJob, apiVersion {API_VERSION}")
    return jobs


def _kind(node: yaml.MappingNode) -> str:
    return next((str(value.value) for key, value in node.value if key.value == "kind"), "")


class _Reader(nodes.Document):
    """Turns nodes into JSON values."""

    changes: Mapping[str, str] = {}
    """Source of each field that the file doesn't have, by its path."""

    def mapping(self, node: yaml.MappingNode, place: str) -> dict[str, Any]:
        """The fields of a mapping. One without a value is left out, as the API server does."""
        values = {key: self._value(value, here) for key, value, here in self.entries(node, place)}
        return {key: value for key, value in values.items() if value is not None}

    def _value(self, node: yaml.Node, place: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, here) for item, here in self.items(node, place)]
        try:
            return nodes.value_of(node)
        except ValueError as error:
            self.problems.add(nodes.line_of(node), place, str(error))
            return None

    def job(self, value: dict[str, Any]) -> TrainingJob | None:
        """The job; None when the value can't be one, each reason reported."""
        try:
            return _validated(value)
        except ValidationError as error:
            details = error.errors()
        numbers = [
            nodes.place_of(detail["loc"])
            for detail in details
            if detail["type"] == "string_type" and isinstance(detail["input"], int | float)
        ]
        texts = [self.changes[path] for path in numbers if path in self.changes]
        for change in texts:
            as_text(value, change)
        return self.job(value) if texts else self.validated(lambda: _validated(value), self._report)

    def _report(self, detail: ErrorDetails) -> None:
        location = detail["loc"]
        path = nodes.place_of(location)
        for rule in broken_rules(detail):
            field = nodes.join(path, rule.field)
            self.problems.add(self.line(field), field if field in self.lines else path, rule.message + self._origin(field))
        if not broken_rules(detail):
            is_unknown, key = detail["type"] == "extra_forbidden", re.sub(r"\[\d+\]", "", path)
            value = {} if isinstance(detail["input"], dict) else detail["input"]
            text = REPLACED.get(key if is_unknown else f"{key}={value}") or (
                unknown(str(location[-1]), _fields(location[:-1]), "unknown field") if is_unknown else explain(detail)
            )
            self.problems.add(self.line(path), path, text + self._origin(path))

    def _origin(self, path: str) -> str:
        sources = [
            how
            for place, how in self.changes.items()
            if path == place or path.startswith((f"{place}.", f"{place}[")) or place.startswith(f"{path}.")
        ]
        return f" ({', '.join(sources)})" if sources else ""


def _validated(value: dict[str, Any]) -> TrainingJob:
    return TrainingJob.model_validate_json(json.dumps(value), strict=True, by_alias=True, by_name=False)


def _fields(location: tuple[str | int, ...]) -> list[str]:
    """The fields that may stand at a place of a TrainingJob."""
    model: type[BaseModel] = TrainingJob
    for part in location:
        if not isinstance(part, int):
            field = next(field for field in model.model_fields.values() if field.alias == part)
            model = _model_in(field.annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone, optional or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for model in map(_model_in, get_args(annotation)) if model), None)


def with_changes(value: dict[str, Any], changes: Iterable[str]) -> dict[str, str]:
    """Put every `path=value` into the job `value`, in their order. Returns, by the full path of each field, how it was given.

    The path is below `spec` unless it begins with spec or metadata; an entry of a list is named by [number], and the value is read as YAML
    reads it in a job file, so `null` leaves the field out. Raises ConfigError.
    """
    sources = {}
    for change in changes:
        parts, text = _split(change)
        _put(value, parts, _read(text, change), change)
        sources["".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)[1:]] = f"--set {change}"
    return sources


def as_text(value: dict[str, Any], source: str) -> None:
    """Put a change again, its value as it was typed: the field takes text, which need not be quoted twice at a command line."""
    change = source.removeprefix("--set ")
    parts, text = _split(change)
    _put(value, parts, text.strip(), change)


def _split(change: str) -> tuple[list[str | int], str]:
    path, equals, text = change.partition("=")
    if not equals or not text.strip():
        raise ConfigError(f"--set {change}: must be path=value, for example --set training.lora.rank=8; null leaves a field out")
    parts: list[str | int] = []
    for name in path.strip().split("."):
        match = _PART.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"--set {change}: {path!r} is not a path: write names with dots between them, and [number] for an entry of a list"
            )
        parts += [match[1], *(int(number) for number in re.findall(r"\d+", match[2]))]
    return (parts if parts[0] in CHANGED_ROOTS else ["spec", *parts]), text


def _read(text: str, change: str) -> Any:
    """Value of a change, read as in a job file."""
    documents = nodes.documents(f"value: {text}", f"--set {change}")
    try:
        return nodes.value_of(documents[0])["value"] if documents else None
    except ValueError as error:
        raise ConfigError(f"--set {change}: {text!r} can't be read: {error}") from None


def _put(value: dict[str, Any], parts: list[str | int], new: Any, change: str) -> None:
    place: Any = value
    for index, part in enumerate(parts[:-1]):
        below: Any = [] if isinstance(parts[index + 1], int) else {}
        place = _entry(place, part, change) if isinstance(part, int) else place.setdefault(part, below)
        if not isinstance(place, dict | list) or isinstance(place, list) != isinstance(parts[index + 1], int):
            raise ConfigError(
                f"--set {change}: {part} is {'a list: name its entry by [number]' if isinstance(place, list) else 'not a mapping'}"
            )
    last = parts[-1]
    if isinstance(last, int):
        _entry(place, last, change)
        place[last] = new
    elif new is None:
        place.pop(last, None)
    else:
        place[last] = new


def _entry(place: list[Any], number: int, change: str) -> Any:
    if number >= len(place):
        raise ConfigError(f"--set {change}: there is no entry [{number}], the list has {len(place)}: give the whole list as [a, b]")
    return place[number]
