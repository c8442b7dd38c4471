"""A cluster file (clusters/NAME.yaml): a Kubernetes cluster as a TrainingCluster, or hosts. All its mistakes at once. Text in, values
out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic_core import ErrorDetails

from lockstep.api.cluster import ClusterMetadata, Memlock, Platform, TrainingCluster, TrainingClusterSpec
from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.clusterkeys import (
    CLUSTER,
    HOST_KEYS,
    ON_HOSTS,
    WITHOUT_EFFECT,
    Calibration,
    Calibrations,
    ClusterSection,
    Key,
    KeyTable,
    Location,
    PairsFigure,
    labels,
    names,
)
from lockstep.api.files.problems import broken_rules, explain
from lockstep.api.hosts import HostDefaults, HostsCluster, HostsSection
from lockstep.api.model import Model
from lockstep.api.names import HOSTS, KUBERNETES
from lockstep_spec.choices import StorageMode

M = TypeVar("M", bound=Model)
MEASURED = tuple(Calibrations.model_fields)
"""Sections that measurements write."""


class ClusterFile(NamedTuple):
    """Content of a cluster file."""

    cluster: ClusterSection
    profile: TrainingCluster
    calibration: tuple[Calibration, ...] = ()
    """Measurements of the cluster, by transport."""
    lines: Mapping[str, int] = {}
    """The line of every key that the file has, for example network.rdma.rails[0].network."""
    hosts: HostsCluster | None = None
    """The hosts of a file with `platform: hosts`. Then `profile` is what a job's run is resolved with, and no cluster has it."""
    pairs: tuple[PairsFigure, ...] = ()
    """Rates between pairs of nodes, by transport."""

    @property
    def kind(self) -> str:
        """Return the name of the backend that runs its jobs."""
        return KUBERNETES if self.hosts is None else HOSTS

    def its_hosts(self, named: str) -> HostsCluster:
        """Return the hosts. Raises ConfigError for a Kubernetes cluster, which was given as `named`."""
        if self.hosts is None:
            raise ConfigError(
                f"{named} is a Kubernetes cluster, and this is for cluster files with platform: {HOSTS}; lockstep doctor"
                f" {shlex.quote(named)} checks a cluster"
            )
        return self.hosts


def parse_cluster_file(text: str, source: str) -> ClusterFile:
    """Read the text of a cluster file; `source` is its name in messages.

    Raises ConfigError with one line for every problem: file, line, key, what is valid and the nearest valid key.
    """
    documents = nodes.documents(text, source)
    if len(documents) != 1 or not isinstance(documents[0], yaml.MappingNode):
        content = "is empty" if not documents else f"holds {len(documents)} documents" if len(documents) > 1 else "is not a mapping"
        raise ConfigError(f"{source}: {content}; must be one mapping with the keys {', '.join(CLUSTER.below(''))}")
    return _hosts(documents[0], source) if _is_of_hosts(documents[0]) else _cluster(documents[0], source)


def _is_of_hosts(root: yaml.MappingNode) -> bool:
    sections = [value.value for key, value in root.value if key.value == "cluster" and isinstance(value, yaml.MappingNode)]
    return any(key.value == "platform" and value.value == HOSTS for section in sections for key, value in section)


def _cluster(root: yaml.MappingNode, source: str) -> ClusterFile:
    reader = _Reader(source, CLUSTER)
    values = reader.section(root, "")
    cluster = values.pop("cluster", {})
    values |= {"platform": cluster.pop("platform")} if "platform" in cluster else {}  # the one key that moves
    measured = reader.model(Calibrations, {key: values.pop(key) for key in MEASURED if key in values})
    section = reader.model(ClusterSection, cluster, below("cluster"))
    spec = reader.model(TrainingClusterSpec, values)
    if section is None or spec is None or measured is None or reader.problems.entries:
        raise reader.problems.error()
    profile = TrainingCluster(metadata=ClusterMetadata(name=section.name), spec=spec)
    return ClusterFile(section, profile, tuple(measured.calibration), reader.lines, pairs=tuple(measured.pairs))


def _hosts(root: yaml.MappingNode, source: str) -> ClusterFile:
    reader = _Reader(source, ON_HOSTS)
    values = reader.section(root, "")
    cluster = values.pop("cluster", {})
    cluster.pop("", None)  # (the platform)
    measured = reader.model(Calibrations, {key: values.pop(key) for key in MEASURED if key in values})
    section = reader.model(HostsSection, cluster, below("cluster"))
    stated = values.pop("defaults", {})
    defaults = reader.model(HostDefaults, stated, below("defaults"))
    own = {field: values.pop(field) for field in {key.model.split(".")[0].removesuffix("[]") for key in HOST_KEYS} & set(values)}
    if defaults is not None:
        own |= {"hosts": [stated | host for host in own["hosts"]]} if "hosts" in own else {}
    is_reported = "hosts" not in own and any(place.startswith("hosts") for place in reader.reported)
    hosts = None if is_reported else reader.model(HostsCluster, own)
    if "rdma" in values.get("network", {}):
        values["network"]["rdma"]["memlock"] = (
            Memlock.UNLIMITED
        )  # (no pod has to be given the right; the host's own limit is checked there)
    spec = reader.model(TrainingClusterSpec, values)
    if section is None or hosts is None or spec is None or measured is None or reader.problems.entries:
        raise reader.problems.error()
    profile = TrainingCluster(metadata=ClusterMetadata(name=section.name), spec=profile_of_hosts(hosts, spec))
    stand_in = ClusterSection(name=section.name, namespace=HOSTS, description=section.description)
    return ClusterFile(stand_in, profile, tuple(measured.calibration), reader.lines, hosts, tuple(measured.pairs))


def profile_of_hosts(hosts: HostsCluster, spec: TrainingClusterSpec) -> TrainingClusterSpec:
    """The spec that jobs on hosts are resolved with: a node a host, a volume a host unless the file says rwx, and the fewest GPUs that any
    host states.
    """
    changes: dict[str, Any] = {"platform": Platform.KUBERNETES}
    gpus: dict[str, Any] = {"default_nodes": len(hosts.hosts)} | ({} if hosts.least_gpus is None else {"per_node": hosts.least_gpus})
    changes["gpus"] = type(spec.gpus)(**gpus)
    if "mode" not in spec.storage.model_fields_set:
        changes["storage"] = type(spec.storage)(mode=StorageMode.PER_POD)
    return spec.model_copy(update=changes)


def below(section: str) -> Callable[[Location], str]:
    """Turns the location of a field of a section's model into its place in the file."""
    return lambda location: ON_HOSTS.file_path((section, *location))


class _Reader(nodes.Document):
    """Turns nodes into values by a table of keys."""

    def __init__(self, source: str, table: KeyTable) -> None:
        super().__init__(source)
        self.table = table

    def section(self, node: yaml.MappingNode, path: str, place: str = "") -> dict[str, Any]:
        """The values of a section, by model field. `path` is its place in the table, `place` the same with list indexes."""
        values: dict[str, Any] = {}
        valid = self.table.below(path)
        for name, value_node, here in self.entries(node, place):
            if nodes.join(path, name) in WITHOUT_EFFECT:
                continue
            if name not in valid:
                self.report(here, self.table.unknown(name, path))
                continue
            value = self._value(value_node, valid[name], here)
            if value is not None:
                values[self.table.field_of(valid[name])] = value
        return values

    def _value(self, node: yaml.Node, path: str, place: str) -> Any:
        """The value at `path`; None: nothing is there, or it was reported."""
        key = self.table.keys.get(path)
        if node.tag == nodes.NULL and (key is None or key.read in (names, labels)):
            return None
        if key is not None:
            return self._leaf(node, key, place)
        if path.endswith("[]"):
            return self._items(node, path, place)
        if isinstance(node, yaml.MappingNode):
            return self.section(node, path, place)
        self.report(place, f"must be a mapping with the keys {', '.join(self.table.below(path))}")
        return None

    def _items(self, node: yaml.Node, path: str, place: str) -> list[dict[str, Any]] | None:
        fields = ", ".join(self.table.below(path))
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
            return key.read(node, key)
        except ValueError as problem:
            self.report(place, str(problem))
            return None

    def model(self, model: type[M], values: object, to_file: Callable[[Location], str] | None = None) -> M | None:
        """`values` as a `model`; None when they can't be, each reason reported at its key."""
        return self.validated(
            lambda: model.model_validate(values, by_alias=True, by_name=False),
            lambda detail: self._report_detail(detail, to_file or self.table.file_path),
        )

    def _report_detail(self, detail: ErrorDetails, to_file: Callable[[Location], str]) -> None:
        location = detail["loc"]
        for rule in broken_rules(detail):
            place, text = to_file((*location, *rule.field.split("."))), self.table.in_file_words(rule.message)
            # A key that is left out has no line: then it is that of the key which asks for it.
            named = [word for word in re.findall(r"[\w.]+", text) if word in self.lines]
            self.problems.add(self.lines[named[0]] if named and place not in self.lines else self.line(place), place, text)
        if not broken_rules(detail) and to_file(location) not in self.reported:
            self.report(to_file(location), explain(detail))
