"""A cluster file (clusters/NAME.yaml) as a TrainingCluster, with every mistake in it told at once. Text in, values out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic_core import ErrorDetails

from lockstep.api.calibration import Calibration, Calibrations
from lockstep.api.cluster import ClusterMetadata, TrainingCluster, TrainingClusterSpec
from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.clusterkeys import KEYS, ClusterSection, Key, ValueKind, below, field_of, file_path, in_file_words, read_value
from lockstep.api.files.document import Document
from lockstep.api.files.problems import broken_rules, explain, unknown
from lockstep.api.model import Model

Location = tuple[str | int, ...]


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
        content = "is empty" if not documents else f"holds {len(documents)} documents" if len(documents) > 1 else "is no mapping"
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


M = TypeVar("M", bound=Model)


class _Reader(Document):
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
