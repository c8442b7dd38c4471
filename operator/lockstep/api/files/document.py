"""One document of a file: the place and the line of every key, and all that is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lockstep.api.files import yamlnodes as nodes
from lockstep.api.files.problems import Problems

M = TypeVar("M", bound=BaseModel)


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
        for key, key_node, value in nodes.entries(node, place, self.problems):
            here = nodes.join(place, key)
            self.lines[here] = nodes.line_of(key_node)
            yield key, value, here

    def items(self, node: yaml.SequenceNode, place: str) -> Iterator[tuple[yaml.Node, str]]:
        """(entry, its place) of a list."""
        for number, item in enumerate(node.value):
            here = f"{place}[{number}]"
            self.lines[here] = nodes.line_of(item)
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
