"""YAML text as nodes that know their line, within bounds that hold for hostile text too, and the reader of one document. No I/O.

Not ruamel.yaml: it has no bounds for hostile text, and reads numbers and truth values as YAML 1.2 does, not as kubectl.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lockstep.api.errors import ConfigError
from lockstep.api.files.problems import Problems

M = TypeVar("M", bound=BaseModel)

MAX_CHARACTERS = 256 * 1024
MAX_DEPTH = 32
MAX_NODES = 20_000

NULL, BOOL, INT, FLOAT, TEXT, MERGE = (f"tag:yaml.org,2002:{t}" for t in ("null", "bool", "int", "float", "str", "merge"))
SURROGATES = re.compile("[\ud800-\udfff]")


def documents(text: str, source: str) -> list[yaml.Node]:
    """The documents of a YAML or JSON text that aren't empty.

    Raises ConfigError for text that is no YAML, is too long, too deep, or would be too long once its aliases are written out.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{source}: is {len(text)} characters long; at most {MAX_CHARACTERS} are read")
    if text.lstrip().startswith(("{", "[")):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, and has no other raw ones
    try:
        _check_events(text, source)
        roots = [node for node in yaml.compose_all(text, yaml.SafeLoader) if node is not None and node.tag != NULL]
    except yaml.MarkedYAMLError as error:
        hint = "; indent with spaces, not tabs" if "\\t" in str(error.problem) else ""
        raise ConfigError(f"{source}:{_line(error.problem_mark)}: is not valid YAML: {error.problem}{hint}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: is not valid YAML: {' '.join(str(error).split())}") from error
    for node in roots:
        _check_size(node, source)
    return roots


def _check_events(text: str, source: str) -> None:
    """Before composing: composing recurses, and parsing doesn't."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{source}:{_line(event.start_mark)}: is nested more than {MAX_DEPTH} levels deep")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ConfigError(f"{source}:{_line(event.start_mark)}: YAML tags such as {tag!r} are not supported: write plain values")


def _check_size(node: yaml.Node, source: str) -> None:
    sizes: dict[int, int | None] = {}

    def size(one: yaml.Node) -> int:
        """Nodes below `one`, each alias counted as what it stands for."""
        count = sizes.get(id(one), -1)
        if count is None:
            raise ConfigError(f"{source}:{line_of(one)}: an alias refers to a value that contains it")
        if count < 0:
            sizes[id(one)] = None
            count = 1 + sum(size(child) for child in _children(one))
            sizes[id(one)] = count
        if count > MAX_NODES:
            raise ConfigError(f"{source}:{line_of(one)}: has more than {MAX_NODES} values with its aliases written out")
        return count

    size(node)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from (key, value)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def line_of(node: yaml.Node) -> int:
    """The line, counted from 1."""
    return _line(node.start_mark)


def _line(mark: Any) -> int:
    return int(mark.line) + 1 if mark else 1


def text_of(node: yaml.ScalarNode) -> str:
    r"""The characters as written. JSON writes those beyond U+FFFF as two escapes, which YAML leaves apart. Raises ValueError for one
    without the other.
    """
    text = str(node.value)
    if SURROGATES.search(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if half := SURROGATES.search(text):
        raise ValueError(f"\\u{ord(half[0]):04X} is half of a pair of escapes, and no character: write both, or the character itself")
    return text


_TRUE = frozenset({"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"})
_FALSE = frozenset({"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"})
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_ENDLESS = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WHOLE = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_LOOSE = re.compile(r"(?<![0-9])_|_(?![0-9])")
"""An underscore that is not between two digits. YAML drops all of them, but what begins with a point is read by Go's own rules."""


def plain_value(text: str) -> str | int | float | bool | None:
    """The value of a scalar without quotes, as kubectl reads it: YAML 1.1's truth values with y and n, numbers as Go does, and no times.

    That is neither PyYAML's reading nor YAML 1.2's. The rules are those of https://github.com/kubernetes-sigs/yaml (goyaml.v2/resolve.go),
    and the tests hold them against an API server. Raises ValueError for .inf and .nan, which JSON has no words for.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _ENDLESS.fullmatch(text):
        raise ValueError(f"{text} is not a number in JSON: write it in quotes")
    digits = text.replace("_", "")
    if text[0] not in "+-.0123456789" or (text[0] == "." and _LOOSE.search(text)):
        return text
    if _WHOLE.fullmatch(digits):
        sign, whole = (-1 if digits[0] == "-" else 1), digits.lstrip("+-")
        base = {"x": 16, "o": 8, "b": 2}.get(whole[1:2].lower(), 8 if whole[0] == "0" else 10)
        number = sign * int(whole[2:] if whole[1:2].lower() in ("x", "o", "b") else whole, base)
        if -(2**63) <= number < (2**63 if digits[0] in "+-" else 2**64):
            return number if number < 2**63 else float(number)
    if _FLOAT.fullmatch(digits) and abs(float(digits)) != float("inf"):
        fraction = float(digits)
        return int(fraction) if fraction.is_integer() and abs(fraction) < 2**63 else fraction  # (JSON writes 2.0 as 2)
    return text


def value_of(node: yaml.Node) -> Any:
    """The JSON value of a node, as kubectl reads it. Raises ValueError as plain_value does."""
    if isinstance(node, yaml.MappingNode):
        return {text_of(key): value_of(value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
    if isinstance(node, yaml.SequenceNode):
        return [value_of(item) for item in node.value]
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("must be a mapping, a list or a single value")
    return text_of(node) if node.style is not None else plain_value(text_of(node))


def entries(node: yaml.MappingNode, path: str, problems: Problems) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """(key, its node, the value's node) of a mapping; keys that are no text or stand there twice become problems."""
    lines: dict[str, int] = {}
    for key_node, value in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            problems.add(line_of(key_node), path, "a key must be text")
            continue
        try:
            key = text_of(key_node)
        except ValueError as error:
            problems.add(line_of(key_node), path, str(error))
            continue
        inside = join(path, key)
        if key_node.tag == MERGE:
            problems.add(line_of(key_node), inside, "merging with << is not supported: write the keys out")
        elif not _is_text(key_node):
            problems.add(line_of(key_node), inside, "YAML does not read this key as text: write it in quotes")
        elif key in lines:
            problems.add(line_of(key_node), inside, f"duplicate key: it is on line {lines[key]} already")
        else:
            lines[key] = line_of(key_node)
            yield key, key_node, value


def _is_text(node: yaml.ScalarNode) -> bool:
    try:
        return node.style is not None or isinstance(plain_value(text_of(node)), str)
    except ValueError:
        return False


def place_of(location: tuple[str | int, ...]) -> str:
    """The path of a field at pydantic's location, whose mark for "the key itself" is none."""
    written = ""
    for part in (part for part in location if part != "[key]"):
        written += f"[{part}]" if isinstance(part, int) else f".{part}" if written else part
    return written


def join(path: str, key: str) -> str:
    """The path of `key` inside of `path`."""
    return f"{path}.{key}" if path else key


class Document:
    """A reader of one document. A place is a key's path with the numbers of list entries, for example network.rdma.rails[0].network."""

    def __init__(self, source: str, line: int = 1) -> None:
        self.problems = Problems(source)
        self.lines: dict[str, int] = {"": line}
        """The line of every key and entry, by its place."""
        self.reported: set[str] = set()
        """Places with a problem."""

    def entries(self, node: yaml.MappingNode, place: str) -> Iterator[tuple[str, yaml.Node, str]]:
        """(key, node of its value, its place) of a mapping; keys that can't be read become problems."""
        for key, key_node, value in entries(node, place, self.problems):
            here = join(place, key)
            self.lines[here] = line_of(key_node)
            yield key, value, here

    def items(self, node: yaml.SequenceNode, place: str) -> Iterator[tuple[yaml.Node, str]]:
        """(entry, its place) of a list."""
        for number, item in enumerate(node.value):
            here = f"{place}[{number}]"
            self.lines[here] = line_of(item)
            yield item, here

    def line(self, place: str) -> int:
        """The line of a key, or of the nearest section around it that the file has."""
        while place not in self.lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return self.lines[place]

    def report(self, place: str, text: str) -> None:
        """Remember a problem."""
        self.reported.add(place)
        self.problems.add(self.line(place), place, text)

    def validated(self, validate: Callable[[], M], report: Callable[[ErrorDetails], None]) -> M | None:
        """The model that `validate` returns; None when the values can't be one, after `report` was called with each reason."""
        try:
            return validate()
        except ValidationError as error:
            for detail in error.errors():
                report(detail)
            return None
