"""JSON files that tell whether they are whole: the last line is the SHA-256 of every byte before it (pure)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_LINE = ',\n "sha256": "'
_END = '"\n}'


def seal(body: Mapping[str, Any]) -> bytes:
    """A line for each key of the object, and no more: what indents JSON is written in Python, and slow where there are many fragments."""
    head = "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    return f"{head}{_LINE}{_digest(head)}{_END}".encode()


def unseal(content: bytes | str) -> dict[str, Any]:
    """The object that was sealed. Raises ValueError when a single bit is another one."""
    text = content if isinstance(content, str) else content.decode()
    head, line, tail = text.rpartition(_LINE)
    if not line:
        raise ValueError("it is torn: the checksum that ends it is missing")
    if tail != f"{_digest(head)}{_END}":
        raise ValueError("it is damaged: its content does not have its checksum")
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    del value["sha256"]
    return value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
