"""Samples from a file, one at a time: JSONL with `messages`, `prompt` + `completion` or `text`, or plain text.

A file is never held in memory. Every broken line is counted and the first ones are told with file:line, so that a file is mended
in one go; nothing is dropped silently.
"""

from __future__ import annotations

import json
from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_train.errors import ConfigError

REPORTED_LINES = 5
JSONL_SUFFIXES = {".jsonl", ".json", ".ndjson"}
COMPRESSED_SUFFIXES = {".gz", ".zst", ".bz2", ".xz", ".zip"}
TABLE_SUFFIXES = {".parquet", ".arrow", ".feather", ".csv", ".tsv"}


@dataclass(frozen=True)
class Sample:
    """Text as it was read. With a `prompt`, only the `text` after it is the answer."""

    text: str
    prompt: str | None
    line: int
    """Number of its first line in the file, from 1."""

    @property
    def characters(self) -> int:
        return len(self.text) + len(self.prompt or "")


@dataclass(frozen=True)
class Conversation:
    """Messages for the tokenizer's chat template."""

    messages: tuple[dict[str, Any], ...]
    given: int
    """So many of them are the prompt: never learned, whoever speaks."""
    tools: tuple[Any, ...]
    line: int

    @property
    def characters(self) -> int:
        """About, for nothing is rendered yet."""
        return len(str(self.messages)) + len(str(self.tools))


AnySample = Sample | Conversation


@dataclass
class Broken:
    """The lines of one source that can't be used."""

    name: str
    reasons: list[tuple[int, str]] = field(default_factory=list)
    """The first lines of them, in the order of the file, however they were found."""
    count: int = 0

    def add(self, line: int, reason: str) -> None:
        self.count += 1
        insort(self.reasons, (line, reason))
        del self.reasons[REPORTED_LINES:]

    def include(self, other: Broken) -> None:
        """Those that were found elsewhere."""
        self.count += other.count
        self.reasons = sorted([*self.reasons, *other.reasons])[:REPORTED_LINES]

    @property
    def first(self) -> list[str]:
        return [f"{self.name}:{line}: {reason}" for line, reason in self.reasons]

    def refuse(self) -> None:
        """Raises ConfigError when there are any."""
        if self.count:
            more = f" (and {self.count - REPORTED_LINES} more)" if self.count > REPORTED_LINES else ""
            raise ConfigError(f"{self.count} broken lines in the data: " + "; ".join(self.first) + more)


def is_plain_text(path: Path) -> bool:
    """By its name, where no format is stated. Raises ConfigError for what is neither plain text nor JSON lines, though it may look so."""
    suffix = path.suffix.casefold()
    if suffix in COMPRESSED_SUFFIXES:
        raise ConfigError(f"the data {path} is compressed ({suffix}); decompress it, since files are read as they are")
    if suffix in TABLE_SUFFIXES:
        raise ConfigError(
            f"the data {path} is a table ({suffix}); write its rows as JSON lines into a .jsonl file (datasets' to_json does it), "
            "or, if it is something else, state its format"
        )
    if suffix in JSONL_SUFFIXES:
        return False
    if _begins_with_object(path):
        raise ConfigError(
            f"the data {path} would be plain text by its name, but begins with a JSON object; set its format to JSONL or name it .jsonl, "
            "or set its format to Text to learn the JSON itself"
        )
    return True


def _begins_with_object(path: Path) -> bool:
    """Whether the first line that is not blank is a JSON object."""
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise ConfigError(f"the data {path} can't be read: {error.strerror}") from error
    try:
        return isinstance(json.loads(first.decode("utf-8-sig")), dict)
    except ValueError:
        return False


def read_lines(path: Path, broken: Broken) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; one that is not UTF-8 is broken. Raises ConfigError when the file can't be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield number, line.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    broken.add(number, "not UTF-8; convert the file to UTF-8")
    except OSError as error:
        raise ConfigError(f"the data {path} can't be read: {error.strerror}") from error


def read_jsonl(path: Path, broken: Broken) -> Iterator[AnySample]:
    """One sample a line that is not blank."""
    for number, line in read_lines(path, broken):
        if not line.strip():
            continue
        try:
            yield sample_of(parse_object(line), number)
        except ValueError as error:
            broken.add(number, str(error))


def read_text(path: Path, broken: Broken) -> Iterator[AnySample]:
    """Paragraphs: runs of lines that are not blank, each with the number of its first line."""
    block: list[str] = []
    first = 1
    for number, line in read_lines(path, broken):
        if line.strip():
            first = first if block else number
            block.append(line.rstrip())
        elif block:
            yield Sample("\n".join(block), None, first)
            block = []
    if block:
        yield Sample("\n".join(block), None, first)


def parse_object(line: str) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def sample_of(record: Mapping[str, Any], line: int) -> AnySample:
    """What a record holds; of several forms in one record the first of this order counts. Raises ValueError.

    Keys without a value are as good as absent: tables fill them in.
    """
    if record.get("messages") is not None:
        return Conversation(_messages(record, "messages"), 0, _tools(record), line)
    if record.get("prompt") is not None and record.get("completion") is not None:
        if isinstance(record["prompt"], str):
            return Sample(_text(record, "completion"), _text(record, "prompt"), line)
        prompt = _messages(record, "prompt")
        return Conversation((*prompt, *_messages(record, "completion")), len(prompt), _tools(record), line)
    if record.get("text") is not None:
        return Sample(_text(record, "text"), None, line)
    raise ValueError("neither `messages`, nor `prompt` and `completion`, nor `text`")


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is not a string")
    if not value.strip():
        raise ValueError(f"`{key}` is empty")
    return value


def _messages(record: Mapping[str, Any], key: str) -> tuple[dict[str, Any], ...]:
    value = record[key]
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{key}` is not a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"`{key}[{number}]` is not an object with a `role`")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"`{key}[{number}]` has neither a `content` that is a string nor `tool_calls`")
    return tuple({name: item for name, item in message.items() if item is not None} for message in value)


def _tools(record: Mapping[str, Any]) -> tuple[Any, ...]:
    value = record.get("tools")
    if isinstance(value, str):  # tables without nested columns hold it as JSON text
        value = json.loads(value)
    if value is not None and not isinstance(value, list):
        raise ValueError("`tools` is not a list")
    return tuple(value or ())
