"""Values of a YAML file of another tool, each with its path and line, so that none is dropped silently."""

from __future__ import annotations

import re
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


_HOLDER = re.compile(r"(?:[_.]|x-|(?:defaults?|base|common|shared|anchors?|templates?)(?:\.|$))")
"""Sections that are there to be merged into others."""


def leaves_of(text: str, source: str) -> list[Leaf]:
    """Every value of the one document of a YAML text, in the order of the file; what others merge comes last. Raises ConfigError where it
    is no mapping.
    """
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
    return sorted(leaves, key=lambda leaf: "<<:" in text and _HOLDER.match(leaf.path) is not None)


def _leaves(document: nodes.Document, node: yaml.Node, place: str) -> Iterator[Leaf]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, value in _entries(document, node, place).values():
            here = nodes.join(place, nodes.text_of(key))
            document.lines[here] = nodes.line_of(key)
            yield from _leaves(document, value, here)
    elif isinstance(node, yaml.SequenceNode) and any(not isinstance(item, yaml.ScalarNode) for item in node.value):
        for item, here in document.items(node, place):
            yield from _leaves(document, item, here)
    else:
        yield Leaf(place, nodes.value_of(node), document.line(place))


def _entries(document: nodes.Document, node: yaml.MappingNode, place: str) -> dict[str, tuple[yaml.ScalarNode, yaml.Node]]:
    """Return the keys of a mapping as the tools' own readers have them: n is a name, and << merges, behind the keys of the file itself."""
    own: dict[str, tuple[int, str]] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            line, earlier = own.setdefault(key.value, (nodes.line_of(key), str(value.value)))
            if earlier != str(value.value):
                document.problems.add(nodes.line_of(key), nodes.join(place, key.value), f"duplicate key: it is on line {line} already")
    yaml.SafeLoader("").flatten_mapping(node)
    return {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}


def leftover_lines(source: str, leftovers: Sequence[Leftover]) -> Iterator[str]:
    """A line for each, with its place in the file."""
    for one in leftovers:
        yield f"{source}:{one.line}: {one.what}: {one.reason}"
