"""A cluster file (clusters/NAME.yaml) as a TrainingCluster, with every mistake in it told at once. Text in, values out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import yaml
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from lockstep.api.calibration import Calibration, Calibrations
from lockstep.api.cluster import ClusterMetadata, TrainingCluster, TrainingClusterSpec
from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.clusterkeys import API_PATTERN, KEYS, Key, Kind, below, file_path, in_file_words
from lockstep.api.files.clustervalues import read_value
from lockstep.api.files.problems import Problems, broken_rules, explain, unknown
from lockstep.api.model import DnsLabel, DnsName, Model


class ClusterSection(Model):
    """What the command line needs to know of a cluster, besides its spec."""

    name: DnsName
    """Name of the file and of the TrainingCluster."""
    api: Annotated[str | None, Field(pattern=API_PATTERN, max_length=253)] = None
    """Host of the cluster's API server: compared with the current kubeconfig context before anything is sent."""
    namespace: DnsLabel
    """The namespace that jobs run in."""
    description: Annotated[str, Field(max_length=1024)] = ""
    """One line for list-clusters."""


class ClusterFile(NamedTuple):
    """What a cluster file says."""

    cluster: ClusterSection
    profile: TrainingCluster
    calibration: tuple[Calibration, ...] = ()
    """What was measured there, by transport."""
    lines: Mapping[str, int] = {}
    """The line of every key that the file has, for example network.rdma.rails[0].network."""


def parse_cluster_file(text: str, source: str) -> ClusterFile:
    """Reads the text of a cluster file; `source` is its name in messages.

    Raises ConfigError with one line for every problem: file, line, key, what is valid and the nearest valid key.
    """
    documents = nodes.documents(text, source)
    if len(documents) != 1 or not isinstance(documents[0], yaml.MappingNode):
        content = "is empty" if not documents else f"holds {len(documents)} documents" if len(documents) > 1 else "is no mapping"
        raise ConfigError(f"{source}: {content}; must be one mapping with the keys {', '.join(below(''))}")
    reader = _Reader(Problems(source))
    values = reader.section(documents[0], "")
    cluster = values.pop("cluster", {})
    values |= {"platform": cluster.pop("platform")} if "platform" in cluster else {}  # the one key that moves
    measured = reader.validated(Calibrations, {key: values.pop(key) for key in ("calibration",) if key in values}, file_path)
    section = reader.validated(ClusterSection, cluster, lambda place: ".".join(("cluster", *map(str, place))))
    spec = reader.validated(TrainingClusterSpec, values, file_path)
    if section is None or spec is None or measured is None or reader.problems.found:
        raise reader.problems.error()
    profile = TrainingCluster(metadata=ClusterMetadata(name=section.name), spec=spec)
    return ClusterFile(section, profile, tuple(measured.calibration), reader.lines)


M = TypeVar("M", bound=Model)


class _Reader:
    """Turns nodes into values by the table of keys, and remembers the line of every key."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.lines: dict[str, int] = {"": 1}
        self.reported: set[str] = set()

    def section(self, node: yaml.MappingNode, path: str, place: str = "") -> dict[str, Any]:
        """The values of a section, by model field. `path` is its place in the table, `place` the same with list indexes."""
        values: dict[str, Any] = {}
        valid = below(path)
        for name, key_node, value_node in nodes.entries(node, place, self.problems):
            here = nodes.join(place, name)
            self.lines[here] = nodes.line_of(key_node)
            if name not in valid:
                self._report(here, _unknown(name, path))
                continue
            value = self._value(value_node, valid[name], here)
            if value is not None:
                values[KEYS[valid[name]].model.split(".")[-1] if valid[name] in KEYS else name] = value
        return values

    def _value(self, node: yaml.Node, path: str, place: str) -> Any:
        """The value at `path`; None: nothing is there, or it was reported."""
        key = KEYS.get(path)
        if node.tag == nodes.NULL and (key is None or key.kind in (Kind.NAMES, Kind.LABELS)):
            return None
        if key is not None:
            return self._leaf(node, key, place)
        if path.endswith("[]"):
            return self._items(node, path, place)
        if isinstance(node, yaml.MappingNode):
            return self.section(node, path, place)
        self._report(place, f"must be a mapping with the keys {', '.join(below(path))}")
        return None

    def _items(self, node: yaml.Node, path: str, place: str) -> list[dict[str, Any]] | None:
        fields = ", ".join(below(path))
        if not isinstance(node, yaml.SequenceNode):
            self._report(place, f"must be a list of mappings with the keys {fields}")
            return None
        found = []
        for number, item in enumerate(node.value):
            here = f"{place}[{number}]"
            self.lines[here] = nodes.line_of(item)
            if isinstance(item, yaml.MappingNode):
                found.append(self.section(item, path, here))
            else:
                self._report(here, f"must be a mapping with the keys {fields}")
        return found if len(found) == len(node.value) else None

    def _leaf(self, node: yaml.Node, key: Key, place: str) -> Any:
        try:
            return read_value(node, key)
        except ValueError as problem:
            self._report(place, str(problem))
            return None

    def _report(self, place: str, text: str) -> None:
        self.reported.add(place)
        self.problems.add(self._line(place), place, text)

    def _line(self, place: str) -> int:
        """The line of the key, or of the nearest section around it that the file has."""
        while place not in self.lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return self.lines[place]

    def validated(self, model: type[M], values: object, to_file: Callable[[tuple[str | int, ...]], str]) -> M | None:
        """`values` as a `model`; None when they can't be, each reason reported at its key."""
        try:
            return model.model_validate(values, by_alias=True, by_name=False)
        except ValidationError as error:
            for detail in error.errors():
                self._report_detail(detail, to_file)
            return None

    def _report_detail(self, detail: ErrorDetails, to_file: Callable[[tuple[str | int, ...]], str]) -> None:
        location = detail["loc"]
        for rule in broken_rules(detail):
            place, text = to_file((*location, *rule.field.split("."))), in_file_words(rule.message)
            # A key that is left out has no line: then it is that of the key which asks for it.
            named = [word for word in re.findall(r"[\w.]+", text) if word in self.lines]
            self.problems.add(self.lines[named[0]] if named and place not in self.lines else self._line(place), place, text)
        if not broken_rules(detail) and to_file(location) not in self.reported:
            self._report(to_file(location), explain(detail))


def _unknown(name: str, path: str) -> str:
    """The text for an unknown key: the nearest one here, or where a key of that name belongs."""
    homes = [key for key in KEYS if key.split(".")[-1] == name]
    if homes and not path.startswith(homes[0].rpartition(".")[0] + "."):
        return f"unknown key here; it belongs to {homes[0]}"
    return unknown(name, below(path))
