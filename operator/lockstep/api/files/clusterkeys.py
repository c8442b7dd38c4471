"""Keys of a cluster file (clusters/NAME.yaml), derived from the models: one table for Kubernetes, one for hosts; and the value of one key.

A key is called as the models' field, in snake_case; TrainingCluster has the same name in camelCase. `EXCEPTIONS` and `WORDS` list what is
called otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import Field
from pydantic.alias_generators import to_camel

from lockstep.api.cluster import Memlock, Platform, TrainingClusterSpec
from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.problems import Problems, unknown
from lockstep.api.hosts import HostDefaults, HostsCluster, HostsSection
from lockstep.api.model import DAY_PATTERN, SERVER_PATTERN, Decimal, DnsLabel, DnsName, Model, list_map
from lockstep.api.names import HOSTS
from lockstep_spec.choices import StorageMode

Location = tuple[str | int, ...]
Reader = Callable[[yaml.Node, "Key"], Any]


class ClusterSection(Model):
    """Section `cluster` of a cluster file: what the command line needs to know besides the cluster's spec."""

    name: DnsName
    """Name of the file and of the TrainingCluster."""
    api: Annotated[str | None, Field(pattern=SERVER_PATTERN, max_length=253)] = None
    """Host of the cluster's API server: compared with the current kubeconfig context before anything is sent."""
    namespace: DnsLabel
    """The namespace that jobs run in."""
    description: Annotated[str, Field(max_length=1024)] = ""
    """One line for `lockstep cluster list`."""


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


class PairsFigure(Model):
    """Rates between pairs of nodes. Written by `lockstep cluster calibrate --pairs`, one entry a transport."""

    transport: MeasuredOver
    """Transport that was measured: RDMA by ib_write_bw, TCP by sockets."""
    nodes: Annotated[int, Field(ge=2, le=1024)]
    """Nodes that took part."""
    day: Annotated[str, Field(pattern=DAY_PATTERN, max_length=10)]
    """Day of the measurement, as 2026-11-21 (UTC)."""
    least_gigabits: Decimal
    """Gb/s that even the slowest pair reaches: over all rails together by RDMA, over the best network by TCP."""
    usual_gigabits: Decimal
    """Gb/s that good pairs reach."""


class Calibrations(Model):
    """The file's sections `calibration` and `pairs`: what was measured."""

    calibration: Annotated[list[Calibration], Field(max_length=2, json_schema_extra=list_map("transport"))] = []
    """Sweeps that were measured, one a transport."""
    pairs: Annotated[list[PairsFigure], Field(max_length=2, json_schema_extra=list_map("transport"))] = []
    """Rates between pairs of nodes that were measured, one a transport."""


@dataclass(frozen=True)
class Key:
    """One key. `[]` stands after a list of mappings; `model` is its field inside of the TrainingCluster's spec, or of the section that it
    is for.
    """

    file: str
    model: str
    read: Reader
    """Function that returns its value, as its field takes it, and raises ValueError that says what is valid."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """The value of the field by the word that the file has for it."""


def text(node: yaml.Node, key: Key) -> str:
    """Return text; numbers are, too: 32 and "32" are the same quantity."""
    return _text(node, "text")


def _scalar(node: yaml.Node, expected: str) -> yaml.ScalarNode:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"must be {expected}")
    if node.tag == nodes.NULL:
        raise ValueError(f"has no value: must be {expected}; leave the key out for its default")
    return node


def _text(node: yaml.Node, expected: str) -> str:
    """Return the text as written. Raises ValueError for no, on and yes, which YAML 1.1 reads as truth values."""
    scalar = _scalar(node, expected)
    if scalar.tag == nodes.BOOL:
        raise ValueError(f"must be {expected}, but YAML reads {scalar.value} as a truth value: write it in quotes")
    return nodes.text_of(scalar)


def integer(node: yaml.Node, key: Key) -> int:
    """Return a whole number; "3" is one, too."""
    text = _scalar(node, "a whole number").value
    if not re.fullmatch(r"-?(0|[1-9][0-9]{0,9})", text):
        raise ValueError(f"{text!r} is not valid: must be a whole number such as 4")
    return int(text)


def switch(node: yaml.Node, key: Key) -> bool:
    """Return true or false; "true" is true, too."""
    text = _scalar(node, "true or false").value
    if text.lower() not in _TRUTH:
        raise ValueError(f"{text!r} is not valid: must be true or false")
    return _TRUTH[text.lower()]


_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def names(node: yaml.Node, key: Key) -> list[str]:
    """Return a list, or names divided by commas."""
    if isinstance(node, yaml.SequenceNode):
        return [_text(item, "a list of names") for item in node.value]
    written = _text(node, 'a list, or names divided by commas such as "net1,net2"')
    return [name.strip() for name in written.split(",")] if written.strip() else []


def labels(node: yaml.Node, key: Key) -> dict[str, str]:
    """Return a mapping of text to text."""
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("must be a mapping of labels to values")
    problems = Problems("")
    labels = {name: _text(value, f"text for {name}") for name, _, value in nodes.entries(node, "", problems)}
    for problem in sorted(problems.entries):
        raise ValueError(f"{problem.path}: {problem.text}")
    return labels


def choice(node: yaml.Node, key: Key) -> str:
    """Return the value of the field that the word stands for."""
    written = _text(node, f"one of {', '.join(key.choices)}")
    if written not in key.choices:
        valid = [*key.choices, *([HOSTS] if key.file == HOSTS_PLATFORM.file and HOSTS not in key.choices else ())]
        raise ValueError(unknown(written, valid, f"{written!r} is not valid").replace("valid here", "valid"))
    return key.choices[written]


def count_or_names(node: yaml.Node, key: Key) -> int | list[str]:
    """Return a whole number, or what `names` does."""
    is_count = isinstance(node, yaml.ScalarNode) and re.fullmatch(r"-?[0-9]+", node.value.strip())
    return integer(node, key) if is_count else names(node, key)


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
_READERS: Mapping[Any, Reader] = {int: integer, bool: switch, list: names, dict: labels, "hosts[].gpus": count_or_names}
"""Function that reads the values of a type, or of one key; `text` reads all others."""


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
        return Key(file, model, choice, WORDS.get(kind) or {value.value: value.value for value in kind})
    return Key(file, model, _READERS.get(file) or _READERS.get(get_origin(kind) or kind, text))


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
HOSTS_PLATFORM = Key("cluster.platform", "", choice, {HOSTS: HOSTS})
HOSTS_SECTION_KEYS = (*_keys(HostsSection, "cluster"), HOSTS_PLATFORM)
HOST_KEYS = tuple(sorted(_keys(HostsCluster), key=lambda key: key.file != "hosts[].name"))
DEFAULTS_KEYS = tuple(_keys(HostDefaults, "defaults"))
MEANINGLESS = {
    "cluster.api": "hosts have no API server",
    "cluster.namespace": "hosts have no namespaces",
    "nodes": "list the machines in hosts",
    "storage": "hosts[].workspace and hosts[].datasets name the folders, and storage has the key mode alone",
    "network.rdma.rails": "a host has its NICs; network.rdma.devices chooses among them",
    "network.rdma.memlock": "the memory that a login may lock is the host's own limit",
    "security": "ranks run as the user who logs in",
    "gpus": "hosts[].gpus says which GPUs jobs may take",
    "resources": "ranks take what the host has; a job's own spec.resources limits them",
    "image": "hosts run no image; hosts[].python or environment says where the packages are",
    "shm_size": "a host's /dev/shm has its own size",
    "pod": "hosts have no pods; variables stand in hosts[].env",
}
"""Keys and sections of a cluster file that mean nothing on hosts, with what counts there."""
WITHOUT_EFFECT = {
    "security.requires_privileged_scc": "it has no effect: no pod that Lockstep makes is privileged",
}
"""Keys of a cluster file that guides have and Lockstep doesn't need. They are read over, and `lockstep cluster lint` says why."""
ALSO_ON_HOSTS = ("storage.mode", "network.", "nccl.", "notes")
"""Beginnings of the keys of the cluster's spec that a file of hosts has, too, but for the meaningless ones."""
HOSTS_PROFILE_KEYS = tuple(
    key
    for key in PROFILE_KEYS
    if key.file.startswith(ALSO_ON_HOSTS) and not any(key.file.startswith(name) for name in MEANINGLESS if name != "storage")
)


class KeyTable:
    """The keys of one kind of cluster file, and what is said about all others."""

    def __init__(self, keys: Iterable[Key], elsewhere: Callable[[str], str | None]) -> None:
        """`elsewhere`: what is said about the path of a key that only another kind of file has."""
        self.keys = {key.file: key for key in keys}
        self._elsewhere = elsewhere
        in_models = [key for key in self.keys.values() if key not in OUTSIDE_MODELS]
        self._words = {
            camel: snake
            for key in in_models
            for camel, snake in [*zip(key.model.split("."), key.file.split("."), strict=False), *((c, f) for f, c in key.choices.items())]
            if camel != snake and key.file != "cluster.platform"
        }

    def below(self, path: str) -> dict[str, str]:
        """The keys that may stand inside of section `path` ("" is the file): name → path; lists of mappings end in []."""
        keys: dict[str, str] = {}
        for key in self.keys:
            if key.startswith(f"{path}." if path else ""):
                segment = key.removeprefix(f"{path}." if path else "").split(".")[0]
                keys[segment.removesuffix("[]")] = f"{path}.{segment}" if path else segment
        return keys

    def field_of(self, path: str) -> str:
        """Name of the model's field, in camelCase, that a key or a section becomes."""
        return self.keys[path].model.rpartition(".")[2] if path in self.keys else to_camel(path.rpartition(".")[2].removesuffix("[]"))

    def file_path(self, location: Location) -> str:
        """Path in the file of a field of the models: ("pod", "volumes", 0, "storageClass") → pod.volumes[0].class."""
        return self.in_file_words(nodes.place_of(location))

    def in_file_words(self, message: str) -> str:
        """A message about the models in the words of the file: gpuNodes → gpu_nodes, PerPod → volumeClaimTemplates."""
        return re.sub(r"[A-Za-z][A-Za-z0-9]*", lambda word: self._words.get(word[0], word[0]), message)

    def unknown(self, name: str, path: str) -> str:
        """The text for an unknown key of section `path`: why it isn't one here, where a key of that name belongs, or the nearest one."""
        elsewhere = self._elsewhere(nodes.join(path, name))
        if elsewhere is not None:
            return elsewhere
        homes = [key for key in self.keys if key.split(".")[-1] == name]
        if homes and not path.startswith(homes[0].rpartition(".")[0] + "."):
            return f"unknown key here; it belongs to {homes[0]}"
        return unknown(name, self.below(path))


OUTSIDE_MODELS = (*SECTION_KEYS, *HOSTS_SECTION_KEYS, *CALIBRATION_KEYS, *DEFAULTS_KEYS)
"""Keys whose sections are read apart from the rest of the file."""
_ONLY_ON_HOSTS = {re.split(r"[.\[]", key.file)[0] for key in (*HOST_KEYS, *DEFAULTS_KEYS)}


def _only_on_hosts(path: str) -> str | None:
    return f"is for a file of hosts: write platform: {HOSTS} in section cluster" if path in _ONLY_ON_HOSTS else None


def _meaningless(path: str) -> str | None:
    reason = MEANINGLESS.get(path) or (MEANINGLESS["storage"] if path.startswith("storage.") and path in CLUSTER.keys else None)
    return f"has no meaning with platform: {HOSTS}: {reason}" if reason else None


CLUSTER = KeyTable((*SECTION_KEYS, *PROFILE_KEYS, *CALIBRATION_KEYS), _only_on_hosts)
ON_HOSTS = KeyTable((*HOSTS_SECTION_KEYS, *HOST_KEYS, *DEFAULTS_KEYS, *HOSTS_PROFILE_KEYS, *CALIBRATION_KEYS), _meaningless)
KEYS = CLUSTER.keys
"""Keys of a file that describes a Kubernetes cluster."""
