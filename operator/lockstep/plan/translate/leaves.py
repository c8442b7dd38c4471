"""Values of a YAML file of another tool, each with its path and line, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes as nodes


@dataclass(frozen=True)
class Leaf:
    """One value."""

    path: str
    """For example cluster.nodes[0].ip. A list of plain values is one value."""
    value: Any
    line: int


@dataclass(frozen=True)
class Leftover:
    """Something of another tool's file that Lockstep's file doesn't have."""

    line: int
    what: str
    """Text of the file."""
    reason: str
    """Place where it belongs, or the reason why nothing needs it."""


def leaves_of(text: str, source: str) -> list[Leaf]:
    """Every value of the one document of a YAML text, in the order of the file. Raises ConfigError where it is no mapping."""
    roots = nodes.documents(text, source)
    if len(roots) != 1 or not isinstance(roots[0], yaml.MappingNode):
        raise ConfigError(f"{source}: must be one YAML mapping")
    document = nodes.Document(source)
    try:
        leaves = list(_leaves(document, roots[0], ""))
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if document.problems.entries:
        raise document.problems.error()
    return leaves


def _leaves(document: nodes.Document, node: yaml.Node, place: str) -> Iterator[Leaf]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for _, value, here in document.entries(node, place):
            yield from _leaves(document, value, here)
    elif isinstance(node, yaml.SequenceNode) and any(not isinstance(item, yaml.ScalarNode) for item in node.value):
        for item, here in document.items(node, place):
            yield from _leaves(document, item, here)
    else:
        yield Leaf(place, nodes.value_of(node), document.line(place))


def leftover_lines(source: str, leftovers: Sequence[Leftover]) -> Iterator[str]:
    """A line for each, with its place in the file."""
    for one in leftovers:
        yield f"{source}:{one.line}: {one.what}: {one.reason}"
