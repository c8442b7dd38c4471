"""A cluster file (clusters/NAME.yaml) as a TrainingCluster: its keys, derived from the models, and all its mistakes at once. Text in, values out.

A key is called as the models' field, in snake_case; TrainingCluster has the same name in camelCase. `EXCEPTIONS` and `WORDS` list what is called otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import Field
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from lockstep.api.cluster import ClusterMetadata, Memlock, Platform, TrainingCluster, TrainingClusterSpec
from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.problems import Problems, broken_rules, explain, unknown
from lockstep.api.model import DAY_PATTERN, SERVER_PATTERN, Decimal, DnsLabel, DnsName, Model, list_map
from lockstep_spec.choices import StorageMode

M = TypeVar("M", bound=Model)
Location = tuple[str | int, ...]


class ClusterSection(Model):
    """Section `cluster` of a cluster file: what the command line needs to know besides the cluster's spec."""

    name: DnsName
    """Name of the file and of the TrainingCluster."""
    api: Annotated[str | None, Field(pattern=SERVER_PATTERN, max_length=253)] = None
    """Host of the cluster's API server: compared with the current kubeconfig context before anything is sent."""
    namespace: DnsLabel
    """The namespace that jobs run in."""
    description: Annotated[str, Field(max_length=1024)] = ""
    """One line for list-clusters."""


class MeasuredOver(StrEnum):
    """Transport that the pods were built for."""

    RDMA = "RDMA"
    TCP = "TCP"


class SweepPoint(Model):
    """One size of the all-reduce sweep."""

    bytes: Annotated[int, Field(ge=1, le=2**53)]
    """Bytes that each rank reduced."""
    busbw: Decimal
    """Bus bandwidth in decimal GB/s (10^9 bytes a second): 2 (ranks - 1) / ranks × bytes / time, as nccl-tests gives it."""


class Calibration(Model):
    """One all-reduce sweep. Written by `lockstep cluster calibrate`, one entry a transport."""

    transport: MeasuredOver
    """Transport that the pods were built for: RDMA or TCP."""
    nodes: Annotated[int, Field(ge=1, le=1024)]
    """Nodes that took part."""
    ranks: Annotated[int, Field(ge=2, le=65536)]
    """Ranks that took part: n of the formula."""
    day: Annotated[str, Field(pattern=DAY_PATTERN, max_length=10)]
    """Day of the measurement, as 2026-11-21 (UTC)."""
    sweep: Annotated[list[SweepPoint], Field(min_length=1, max_length=64, json_schema_extra=list_map("bytes"))]
    """Sizes and their bandwidths."""


class Calibrations(Model):
    """The file's section `calibration`."""

    calibration: Annotated[list[Calibration], Field(max_length=2, json_schema_extra=list_map("transport"))] = []
    """Sweeps that were measured, one a transport."""


class ValueKind(Enum):
    """Form in which a value may be written."""

    TEXT = auto()  # numbers too: 32 and "32" are the same quantity
    INTEGER = auto()  # "3" too
    SWITCH = auto()  # true or false, "true" too
    NAMES = auto()  # a list, or names divided by commas
    LABELS = auto()  # a mapping of text to text
    CHOICE = auto()  # one of `choices`


@dataclass(frozen=True)
class Key:
    """One key. `[]` stands after a list of mappings; `model` is its field inside of the TrainingCluster's spec, or of the section that it is for."""

    file: str
    model: str
    kind: ValueKind = ValueKind.TEXT
    choices: Mapping[str, str] = field(default_factory=dict)
    """The value of the field by the word that the file has for it."""


EXCEPTIONS = {
    "platform": "cluster.platform",
    "network.mode": "",  # has no key: `lockstep deploy --mode` sets it
    "pod.volumes[].storage_class": "pod.volumes[].class",
    "pod.runtime_class_name": "pod.runtime_class",
}
"""Keys that are called otherwise than their field."""
WORDS: Mapping[Any, Mapping[str, str]] = {
    StorageMode: {"rwx": StorageMode.SHARED.value, "volumeClaimTemplates": StorageMode.PER_POD.value},
    Platform: {value.lower(): value.value for value in Platform},
    Memlock: {value.lower(): value.value for value in Memlock},
}
"""Values that are called otherwise, by the word of the file."""
_KINDS = {int: ValueKind.INTEGER, bool: ValueKind.SWITCH, list: ValueKind.NAMES, dict: ValueKind.LABELS}


def _keys(model: type[Model], file: str = "", path: str = "") -> Iterator[Key]:
    """Every key of a section whose fields are `model`'s."""
    for name, info in model.model_fields.items():
        here, field_path = nodes.join(file, name), nodes.join(path, info.alias or name)
        key, kind = EXCEPTIONS.get(here, here), _plain_type(info.annotation)
        items = _plain_type(get_args(kind)[0]) if get_origin(kind) is list else None
        inner = items or kind
        if isinstance(inner, type) and issubclass(inner, Model):
            mark = "[]" if items else ""
            yield from _keys(inner, key + mark, field_path + mark)
        elif key:
            yield _key(key, field_path, kind)


def _key(file: str, model: str, kind: Any) -> Key:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Key(file, model, ValueKind.CHOICE, WORDS.get(kind) or {value.value: value.value for value in kind})
    return Key(file, model, _KINDS.get(get_origin(kind) or kind, ValueKind.TEXT))


def _plain_type(annotation: Any) -> Any:
    """The type of a field's value where it is set."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _plain_type(next(one for one in get_args(annotation) if one is not type(None)))
    return annotation


SECTION_KEYS = tuple(_keys(ClusterSection, "cluster"))
"""Keys that the command line reads; not part of the cluster."""
PROFILE_KEYS = tuple(_keys(TrainingClusterSpec))
CALIBRATION_KEYS = tuple(_keys(Calibrations))
"""Keys that `lockstep cluster calibrate` writes and the command line reads; not part of the cluster."""

KEYS = {key.file: key for key in SECTION_KEYS + PROFILE_KEYS + CALIBRATION_KEYS}
_FILE_PATHS = {key.model: key.file for key in PROFILE_KEYS}
_WORDS = {
    camel: snake
    for key in PROFILE_KEYS
    for camel, snake in [*zip(key.model.split("."), key.file.split("."), strict=False), *((c, f) for f, c in key.choices.items())]
    if camel != snake and key.file != "cluster.platform"
}


def below(path: str) -> dict[str, str]:
    """The keys that may stand inside of section `path` ("" is the file): name → path; lists of mappings end in []."""
    keys: dict[str, str] = {}
    for key in KEYS:
        if key.startswith(f"{path}." if path else ""):
            segment = key.removeprefix(f"{path}." if path else "").split(".")[0]
            keys[segment.removesuffix("[]")] = f"{path}.{segment}" if path else segment
    return keys


def field_of(path: str) -> str:
    """Name of the model's field, in camelCase, that a key or a section becomes."""
    return KEYS[path].model.rpartition(".")[2] if path in KEYS else to_camel(path.rpartition(".")[2].removesuffix("[]"))


def file_path(location: tuple[str | int, ...]) -> str:
    """Path in the file of a field of the cluster's spec: ("pod", "volumes", 0, "storageClass") → pod.volumes[0].class."""
    location = tuple(part for part in location if part != "[key]")  # pydantic's mark for "the key itself"
    model = ".".join("[]" if isinstance(part, int) else part for part in location).replace(".[]", "[]")
    key = _FILE_PATHS.get(model.removesuffix("[]"))
    written = key + "[]" * model.endswith("[]") if key else ".".join(_WORDS.get(part, part) for part in model.split("."))
    for number in (part for part in location if isinstance(part, int)):
        written = written.replace("[]", f"[{number}]", 1)
    return written


def in_file_words(message: str) -> str:
    """A message about the cluster in the words of the file: gpuNodes → gpu_nodes, PerPod → volumeClaimTemplates."""
    return re.sub(r"[A-Za-z][A-Za-z0-9]*", lambda word: _WORDS.get(word[0], word[0]), message)


def read_value(node: yaml.Node, key: Key) -> Any:
    """The value of one key, as its model field takes it. Raises ValueError that says what is valid."""
    return _READERS[key.kind](node, key)


def _scalar(node: yaml.Node, expected: str) -> yaml.ScalarNode:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"must be {expected}")
    if node.tag == nodes.NULL:
        raise ValueError(f"has no value: must be {expected}; leave the key out for its default")
    return node


def _text(node: yaml.Node, expected: str = "text") -> str:
    """Text as written. YAML 1.1 reads no, on and yes as truth values, which nobody means where text is asked for."""
    scalar = _scalar(node, expected)
    if scalar.tag == nodes.BOOL:
        raise ValueError(f"must be {expected}, but YAML reads {scalar.value} as a truth value: write it in quotes")
    return nodes.text_of(scalar)


def _integer(node: yaml.Node, key: Key) -> int:
    text = _scalar(node, "a whole number").value
    if not re.fullmatch(r"-?(0|[1-9][0-9]{0,9})", text):
        raise ValueError(f"{text!r} is not valid: must be a whole number such as 4")
    return int(text)


def _switch(node: yaml.Node, key: Key) -> bool:
    text = _scalar(node, "true or false").value
    if text.lower() not in _TRUTH:
        raise ValueError(f"{text!r} is not valid: must be true or false")
    return _TRUTH[text.lower()]


_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _names(node: yaml.Node, key: Key) -> list[str]:
    if isinstance(node, yaml.SequenceNode):
        return [_text(item, "a list of names") for item in node.value]
    written = _text(node, 'a list, or names divided by commas such as "net1,net2"')
    return [name.strip() for name in written.split(",")] if written.strip() else []


def _labels(node: yaml.Node, key: Key) -> dict[str, str]:
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("must be a mapping of labels to values")
    problems = Problems("")
    labels = {name: _text(value, f"text for {name}") for name, _, value in nodes.entries(node, "", problems)}
    for problem in sorted(problems.entries):
        raise ValueError(f"{problem.path}: {problem.text}")
    return labels


def _choice(node: yaml.Node, key: Key) -> str:
    written = _text(node, f"one of {', '.join(key.choices)}")
    if written not in key.choices:
        raise ValueError(unknown(written, key.choices, f"{written!r} is not valid").replace("valid here", "valid"))
    return key.choices[written]


_READERS: Mapping[ValueKind, Callable[[yaml.Node, Key], Any]] = {
    ValueKind.TEXT: lambda node, _: _text(node),
    ValueKind.INTEGER: _integer,
    ValueKind.SWITCH: _switch,
    ValueKind.NAMES: _names,
    ValueKind.LABELS: _labels,
    ValueKind.CHOICE: _choice,
}


class ClusterFile(NamedTuple):
    """Content of a cluster file."""

    cluster: ClusterSection
    profile: TrainingCluster
    calibration: tuple[Calibration, ...] = ()
    """Measurements of the cluster, by transport."""
    lines: Mapping[str, int] = {}
    """The line of every key that the file has, for example network.rdma.rails[0].network."""


def parse_cluster_file(text: str, source: str) -> ClusterFile:
    """Read the text of a cluster file; `source` is its name in messages.

    Raises ConfigError with one line for every problem: file, line, key, what is valid and the nearest valid key.
    """
    documents = nodes.documents(text, source)
    if len(documents) != 1 or not isinstance(documents[0], yaml.MappingNode):
        content = "is empty" if not documents else f"holds {len(documents)} documents" if len(documents) > 1 else "is not a mapping"
        raise ConfigError(f"{source}: {content}; must be one mapping with the keys {', '.join(below(''))}")
    reader = _Reader(source)
    values = reader.section(documents[0], "")
    cluster = values.pop("cluster", {})
    values |= {"platform": cluster.pop("platform")} if "platform" in cluster else {}  # the one key that moves
    measured = reader.model(Calibrations, {key: values.pop(key) for key in ("calibration",) if key in values})
    section = reader.model(ClusterSection, cluster, lambda place: ".".join(("cluster", *map(str, place))))
    spec = reader.model(TrainingClusterSpec, values)
    if section is None or spec is None or measured is None or reader.problems.entries:
        raise reader.problems.error()
    profile = TrainingCluster(metadata=ClusterMetadata(name=section.name), spec=spec)
    return ClusterFile(section, profile, tuple(measured.calibration), reader.lines)


class _Reader(nodes.Document):
    """Turns nodes into values by the table of keys."""

    def section(self, node: yaml.MappingNode, path: str, place: str = "") -> dict[str, Any]:
        """The values of a section, by model field. `path` is its place in the table, `place` the same with list indexes."""
        values: dict[str, Any] = {}
        valid = below(path)
        for name, value_node, here in self.entries(node, place):
            if name not in valid:
                self.report(here, _unknown(name, path))
                continue
            value = self._value(value_node, valid[name], here)
            if value is not None:
                values[field_of(valid[name])] = value
        return values

    def _value(self, node: yaml.Node, path: str, place: str) -> Any:
        """The value at `path`; None: nothing is there, or it was reported."""
        key = KEYS.get(path)
        if node.tag == nodes.NULL and (key is None or key.kind in (ValueKind.NAMES, ValueKind.LABELS)):
            return None
        if key is not None:
            return self._leaf(node, key, place)
        if path.endswith("[]"):
            return self._items(node, path, place)
        if isinstance(node, yaml.MappingNode):
            return self.section(node, path, place)
        self.report(place, f"must be a mapping with the keys {', '.join(below(path))}")
        return None

    def _items(self, node: yaml.Node, path: str, place: str) -> list[dict[str, Any]] | None:
        fields = ", ".join(below(path))
        if not isinstance(node, yaml.SequenceNode):
            self.report(place, f"must be a list of mappings with the keys {fields}")
            return None
        values = []
        for item, here in self.items(node, place):
            if isinstance(item, yaml.MappingNode):
                values.append(self.section(item, path, here))
            else:
                self.report(here, f"must be a mapping with the keys {fields}")
        return values if len(values) == len(node.value) else None

    def _leaf(self, node: yaml.Node, key: Key, place: str) -> Any:
        try:
            return read_value(node, key)
        except ValueError as problem:
            self.report(place, str(problem))
            return None

    def model(self, model: type[M], values: object, to_file: Callable[[Location], str] = file_path) -> M | None:
        """`values` as a `model`; None when they can't be, each reason reported at its key."""
        return self.validated(
            lambda: model.model_validate(values, by_alias=True, by_name=False), lambda detail: self._report_detail(detail, to_file)
        )

    def _report_detail(self, detail: ErrorDetails, to_file: Callable[[Location], str]) -> None:
        location = detail["loc"]
        for rule in broken_rules(detail):
            place, text = to_file((*location, *rule.field.split("."))), in_file_words(rule.message)
            # A key that is left out has no line: then it is that of the key which asks for it.
            named = [word for word in re.findall(r"[\w.]+", text) if word in self.lines]
            self.problems.add(self.lines[named[0]] if named and place not in self.lines else self.line(place), place, text)
        if not broken_rules(detail) and to_file(location) not in self.reported:
            self.report(to_file(location), explain(detail))


def _unknown(name: str, path: str) -> str:
    """The text for an unknown key: the nearest one here, or where a key of that name belongs."""
    homes = [key for key in KEYS if key.split(".")[-1] == name]
    if homes and not path.startswith(homes[0].rpartition(".")[0] + "."):
        return f"unknown key here; it belongs to {homes[0]}"
    return unknown(name, below(path))
