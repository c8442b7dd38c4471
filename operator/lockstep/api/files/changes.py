"""`--set training.lora.rank=8`: fields of a job file said at the command line instead. Text in, values out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes

_PART = re.compile(r"([^.\[\]]+)((?:\[\d+\])*)")
_ROOTS = ("spec", "metadata")
Value = dict[str, Any]


def with_changes(value: Value, changes: Iterable[str]) -> dict[str, str]:
    """Put every `path=value` into the job `value`, in their order. Returns, by the full path of each field, how it was given.

    The path is below `spec` unless it begins with spec or metadata; an entry of a list is named by [number], and the value is read as YAML
    reads it in a job file, so `null` leaves the field out. Raises ConfigError.
    """
    sources = {}
    for change in changes:
        parts, text = _split(change)
        _put(value, parts, _read(text, change), change)
        sources["".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)[1:]] = f"--set {change}"
    return sources


def as_text(value: Value, source: str) -> None:
    """Put a change again, its value as it was typed: the field takes text, which need not be quoted twice at a command line."""
    change = source.removeprefix("--set ")
    parts, text = _split(change)
    _put(value, parts, text.strip(), change)


def _split(change: str) -> tuple[list[str | int], str]:
    path, equals, text = change.partition("=")
    if not equals or not text.strip():
        raise ConfigError(f"--set {change}: must be path=value, for example --set training.lora.rank=8; null leaves a field out")
    parts: list[str | int] = []
    for name in path.strip().split("."):
        match = _PART.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"--set {change}: {path!r} is no path: write names with dots between them, and [number] for an entry of a list"
            )
        parts += [match[1], *(int(number) for number in re.findall(r"\d+", match[2]))]
    return (parts if parts[0] in _ROOTS else ["spec", *parts]), text


def _read(text: str, change: str) -> Any:
    """Value of a change, read as in a job file."""
    documents = yamlnodes.documents(f"value: {text}", f"--set {change}")
    try:
        return yamlnodes.value_of(documents[0])["value"] if documents else None
    except ValueError as error:
        raise ConfigError(f"--set {change}: {text!r} can't be read: {error}") from None


def _put(value: Value, parts: list[str | int], new: Any, change: str) -> None:
    place: Any = value
    for index, part in enumerate(parts[:-1]):
        below: Any = [] if isinstance(parts[index + 1], int) else {}
        place = _entry(place, part, change) if isinstance(part, int) else place.setdefault(part, below)
        if not isinstance(place, dict | list) or isinstance(place, list) != isinstance(parts[index + 1], int):
            raise ConfigError(
                f"--set {change}: {part} is {'a list, say which entry by [number]' if isinstance(place, list) else 'no mapping'}"
            )
    last = parts[-1]
    if isinstance(last, int):
        _entry(place, last, change)
        place[last] = new
    elif new is None:
        place.pop(last, None)
    else:
        place[last] = new


def _entry(place: list[Any], number: int, change: str) -> Any:
    if number >= len(place):
        raise ConfigError(f"--set {change}: there is no entry [{number}], the list has {len(place)}: give the whole list as [a, b]")
    return place[number]
