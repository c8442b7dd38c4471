"""Samples from a file: JSONL with `text` or `prompt` + `completion`, or plain text.

Every broken line is reported at once with file:line, so that a file is mended in one go; nothing is dropped silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lockstep_train.errors import ConfigError

REPORTED_LINES = 5


@dataclass(frozen=True)
class Sample:
    """Text as it was read. With a `prompt`, only the `text` after it is learned."""

    text: str
    prompt: str | None
    source: str
    """file:line of its first line."""


def read_samples(path: Path) -> list[Sample]:
    """Samples in the file's order; a plain text file gives one sample a paragraph. Raises ConfigError."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"training.data.path {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line} is not UTF-8; convert the file to UTF-8") from error
    samples = jsonl_samples(text, str(path)) if is_jsonl(path) else paragraphs(text, str(path))
    if not samples:
        raise ConfigError(f"training.data.path {path} holds no samples")
    return samples


def is_jsonl(path: Path) -> bool:
    return path.suffix in {".jsonl", ".json", ".ndjson"}


def jsonl_samples(text: str, name: str) -> list[Sample]:
    """One sample a non-empty line. Raises ConfigError naming the first broken lines and how many there are."""
    samples: list[Sample] = []
    broken: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        source = f"{name}:{number}"
        try:
            samples.append(_jsonl_sample(line, source))
        except ValueError as error:
            broken.append(f"{source}: {error}")
    if broken:
        more = f" (and {len(broken) - REPORTED_LINES} more)" if len(broken) > REPORTED_LINES else ""
        raise ConfigError(f"{len(broken)} broken lines in the data: " + "; ".join(broken[:REPORTED_LINES]) + more)
    return samples


def _jsonl_sample(line: str, source: str) -> Sample:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if "text" in record:
        return Sample(_text(record, "text"), None, source)
    if "prompt" in record and "completion" in record:
        return Sample(_text(record, "completion"), _text(record, "prompt"), source)
    raise ValueError("neither `text` nor `prompt` and `completion`")


def _text(record: dict[str, object], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is not a string")
    if not value.strip():
        raise ValueError(f"`{key}` is empty")
    return value


def paragraphs(text: str, name: str) -> list[Sample]:
    """Runs of non-blank lines, each with the number of its first line."""
    samples: list[Sample] = []
    block: list[str] = []
    first = 1
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line.strip():
            first = first if block else number
            block.append(line.rstrip())
        elif block:
            samples.append(Sample("\n".join(block), None, f"{name}:{first}"))
            block = []
    return samples
