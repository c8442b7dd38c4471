"""A TrainingJob from YAML or JSON text, with every mistake in it told at its line. Text in, job out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.changes import as_text, with_changes
from lockstep.api.files.problems import Problems, broken_rules, explain, unknown
from lockstep.api.job import TrainingJob
from lockstep.api.names import API_VERSION

KIND = "TrainingJob"
ROOT_FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")


class NoJob(ConfigError):
    """A file of other objects, or of none."""


def parse_job_file(text: str, source: str, changes: Sequence[str] = ()) -> TrainingJob:
    """Reads the one TrainingJob of a file; other objects beside it are left alone. `source` is its name in messages.

    `changes`: fields said elsewhere (`training.lora.rank=8`), which count instead of the file's.

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
    reader = _Reader(Problems(source))
    value = reader.mapping(node, "")
    reader.said = with_changes(value, changes)
    for field in value.keys() - set(ROOT_FIELDS):
        reader.problems.add(reader.lines[field], field, unknown(field, ROOT_FIELDS, "unknown field"))
    if value.get("apiVersion") != API_VERSION:
        reader.problems.add(reader.line("apiVersion"), "apiVersion", f"must be {API_VERSION}")
    job = reader.validated(value | {"apiVersion": API_VERSION})
    if job is None or reader.problems.found:
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


class _Reader:
    """Turns nodes into JSON values, and remembers the line of every field."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.lines: dict[str, int] = {}
        self.said: dict[str, str] = {}
        """By its path, how a field was given that the file doesn't give."""

    def mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        """The fields of a mapping. One without a value is left out, as the API server does."""
        self.lines.setdefault(path, nodes.line_of(node))
        found = {}
        for key, key_node, value_node in nodes.entries(node, path, self.problems):
            here = nodes.join(path, key)
            self.lines[here] = nodes.line_of(key_node)
            value = self._value(value_node, here)
            if value is not None:
                found[key] = value
        return found

    def _value(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, f"{path}[{number}]") for number, item in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return nodes.text_of(node) if isinstance(node, yaml.ScalarNode) else None
        try:
            return nodes.plain_value(nodes.text_of(node))
        except ValueError as error:
            self.problems.add(nodes.line_of(node), path, str(error))
            return None

    def _item(self, node: yaml.Node, path: str) -> Any:
        self.lines[path] = nodes.line_of(node)
        return self._value(node, path)

    def line(self, path: str) -> int:
        """The line of the field, or of the nearest one around it that the file has."""
        while path not in self.lines:
            path = re.sub(r"\.?[^.]*$", "", path)
        return self.lines[path]

    def validated(self, value: dict[str, Any]) -> TrainingJob | None:
        """The job; None when the value can't be one, each reason reported."""
        try:
            return TrainingJob.model_validate_json(json.dumps(value), strict=True, by_alias=True, by_name=False)
        except ValidationError as error:
            texts = [
                _path(detail["loc"])
                for detail in error.errors()
                if detail["type"] == "string_type" and isinstance(detail["input"], int | float)
            ]
            said = [self.said[path] for path in texts if path in self.said]
            for detail in [] if said else error.errors():
                self._report(detail)
        for change in said:
            as_text(value, change)
        return self.validated(value) if said else None

    def _report(self, detail: ErrorDetails) -> None:
        location = detail["loc"]
        path = _path(location)
        for rule in broken_rules(detail):
            field = nodes.join(path, rule.field)
            self.problems.add(self.line(field), field if field in self.lines else path, rule.message + self._origin(field))
        if not broken_rules(detail):
            text = (
                unknown(str(location[-1]), _fields(location[:-1]), "unknown field")
                if detail["type"] == "extra_forbidden"
                else explain(detail)
            )
            self.problems.add(self.line(path), path, text + self._origin(path))

    def _origin(self, path: str) -> str:
        said = [
            how
            for place, how in self.said.items()
            if path == place or path.startswith((f"{place}.", f"{place}[")) or place.startswith(f"{path}.")
        ]
        return f" ({', '.join(said)})" if said else ""


def _path(location: tuple[str | int, ...]) -> str:
    written = ""
    for part in (part for part in location if part != "[key]"):  # pydantic's mark for "the key itself"
        written += f"[{part}]" if isinstance(part, int) else f".{part}" if written else part
    return written


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
    return next((found for found in map(_model_in, get_args(annotation)) if found), None)
