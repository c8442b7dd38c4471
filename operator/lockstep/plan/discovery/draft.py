"""A cluster file in the making: keys, values and where each came from; written as commented YAML."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.api.files.yamltext import dump_yaml
from lockstep_spec.words import printable_line

WIDTH = 118
INLINE = 72
"""Longest comment that stands behind its value."""


@dataclass(frozen=True)
class Item:
    """One entry of a list, with what there is to say about it."""

    value: Any
    comment: str = ""


@dataclass(frozen=True)
class Entry:
    """One key of the file. `active` is False for what is not known, or better left out: it is written as a comment with `value` as an
    example.
    """

    key: str
    value: Any
    source: str
    active: bool = True
    unseen: bool = False
    """It is left out because it could not be seen, not because it isn't needed."""


def stated(key: str, value: Any, source: str) -> Entry:
    return Entry(key, value, source)


def left_out(key: str, example: Any, why: str) -> Entry:
    """Better not set."""
    return Entry(key, example, why, active=False)


def unknown(key: str, example: Any, why: str) -> Entry:
    """Could not be seen."""
    return Entry(key, example, f"unknown: {why}", active=False, unseen=True)


def write(header: Sequence[str], entries: Sequence[Entry]) -> str:
    """The text of the file; sections in the order of their first entry."""
    lines = [
        f"# {line}".rstrip()
        for text in map(printable_line, header)
        for line in textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False, break_long_words=False) or [""]
    ]
    for section in dict.fromkeys(entry.key.split(".")[0] for entry in entries):
        inside = [entry for entry in entries if entry.key.split(".")[0] == section]
        lines += ["", *_section(inside, 0)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _section(entries: Sequence[Entry], depth: int) -> Iterator[str]:
    """Entries that share their first `depth` parts."""
    for name in dict.fromkeys(entry.key.split(".")[depth] for entry in entries):
        inside = [entry for entry in entries if entry.key.split(".")[depth] == name]
        leaf = next((entry for entry in inside if entry.key.count(".") == depth), None)
        if leaf is not None:
            yield from _leaf(leaf, name, depth)
            continue
        mark = "" if any(entry.active for entry in inside) else "# "
        yield f"{'  ' * depth}{mark}{name}:"
        yield from _section(inside, depth + 1)


def _leaf(entry: Entry, name: str, depth: int) -> Iterator[str]:
    indent, mark = "  " * depth, "" if entry.active else "# "
    source = printable_line(entry.source)
    listed = isinstance(entry.value, list) and bool(entry.value)
    first = f"{indent}{mark}{name}:" if listed or _is_block(entry.value) else f"{indent}{mark}{name}: {_scalar(entry.value)}"
    if source and (listed or len(source) > INLINE or len(first) + len(source) + 4 > WIDTH):
        yield from (f"{indent}# {line}" for line in textwrap.wrap(source, WIDTH - len(indent) - 2))
        yield first
    else:
        yield f"{first}  # {source}" if source else first
    if _is_block(entry.value):
        yield from (f"{indent}{mark}  {line}".rstrip() for line in dump_yaml(entry.value).splitlines())
    for item in entry.value if listed else []:
        comment = f"  # {printable_line(item.comment)}" if item.comment else ""
        yield f"{indent}{mark}  - {_scalar(item.value)}{comment}"


def _is_block(value: Any) -> bool:
    """A mapping that stands on lines of its own."""
    return isinstance(value, dict) and len(value) > 1


def _scalar(value: Any) -> str:
    """A value on one line, quoted where a parser would take it for something else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_quoted(_scalar(inner))}" for key, inner in value.items()) + "}"
    text = dump_yaml([value]).removeprefix("- ").rstrip("\n")
    return text if "\n" not in text else '"' + str(value).replace('"', "'").replace("\n", " ") + '"'


def _quoted(text: str) -> str:
    """Quote text that a comma or a bracket would end in braces."""
    return json.dumps(text, ensure_ascii=False) if re.search(r"[,\[\]{}]", text) and not text.startswith(("'", '"', "{")) else text
