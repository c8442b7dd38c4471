"""How each kind of value may be written in a cluster file. Files of years are read, so "3" and "net1,net2" are too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.clusterkeys import Key, Kind
from lockstep.api.files.problems import Problems, unknown


def read_value(node: yaml.Node, key: Key) -> Any:
    """The value of one key, as its model field takes it. Raises ValueError that says what is valid."""
    return _READERS[key.kind](node, key)


def _scalar(node: yaml.Node, wanted: str) -> yaml.ScalarNode:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"must be {wanted}")
    if node.tag == nodes.NULL:
        raise ValueError(f"has no value: must be {wanted}; leave the key out for its default")
    return node


def _text(node: yaml.Node, wanted: str = "text") -> str:
    """Text as written. YAML 1.1 reads no, on and yes as truth values, which nobody means where text is asked for."""
    scalar = _scalar(node, wanted)
    if scalar.tag == nodes.BOOL:
        raise ValueError(f"must be {wanted}, but YAML reads {scalar.value} as a truth value: write it in quotes")
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
    found = {name: _text(value, f"text for {name}") for name, _, value in nodes.entries(node, "", problems)}
    for problem in sorted(problems.found):
        raise ValueError(f"{problem.path}: {problem.text}")
    return found


def _choice(node: yaml.Node, key: Key) -> str:
    written = _text(node, f"one of {', '.join(key.choices)}")
    if written not in key.choices:
        raise ValueError(unknown(written, key.choices, f"{written!r} is not valid").replace("valid here", "valid"))
    return key.choices[written]


_READERS: Mapping[Kind, Callable[[yaml.Node, Key], Any]] = {
    Kind.TEXT: lambda node, _: _text(node),
    Kind.INTEGER: _integer,
    Kind.SWITCH: _switch,
    Kind.NAMES: _names,
    Kind.LABELS: _labels,
    Kind.CHOICE: _choice,
}
