"""Reads what the API server sends, so that no object can stop the reader: neither by its depth, nor by its size, nor by its number.

Kubernetes takes JSON of 10,000 levels; Python's parser gives up at about a thousand (RecursionError), and with it a whole list or watch.
A page of a list is limited by the number of its objects only, each of which may have 1.5 MB.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from lockstep.api.objects import DEPTH_MAX, TOO_DEEP

PAGE_BYTES_MAX = 1 << 20
"""Size of one page of a list: parsed, it may take 24 times as much. One object alone is read whatever its size, which the API server
limits.
"""
LEVELS_MAX = DEPTH_MAX + 3
"""Depth of what is read: a list of objects has two levels above them. An object that is too deep stays so; whoever keeps it reports it."""
CHUNK_BYTES = 1 << 18
EVENT_BYTES_MAX = 16 << 20
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
METADATA_EACH = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def loads(content: bytes) -> Any:
    """Return what the JSON text says, `TOO_DEEP` in place of everything deeper than LEVELS_MAX. Raises ValueError."""
    try:
        value = json.loads(content)
    except RecursionError:
        value = json.loads(_without_depths(content, LEVELS_MAX))
    cut_depths(value, LEVELS_MAX)
    return value


def _without_depths(content: bytes, levels: int) -> bytes:
    """The same text, every list and map below `levels` replaced. The loop needs no stack, however deep the text is."""
    parts: list[bytes] = []
    depth = begin = 0
    for token in _TOKEN.finditer(content):
        if token[0] in (b"[", b"{"):
            depth += 1
            if depth == levels + 1:
                parts.append(content[begin : token.start()])
        elif token[0] in (b"]", b"}"):
            if depth == levels + 1:
                parts.append(json.dumps(TOO_DEEP).encode())
                begin = token.end()
            depth -= 1
    return b"".join((*parts, content[begin:]))


def cut_depths(value: Any, levels: int) -> bool:
    """Replace every list and map below so many levels by `TOO_DEEP`, in place. Whether there was any."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels - 1):
        level = [inner for outer in level for inner in _values(outer) if isinstance(inner, dict | list)]
        if not level:
            return False
    deeper = [(outer, key) for outer in level for key in _keys(outer) if isinstance(outer[key], dict | list)]
    for outer, key in deeper:
        outer[key] = TOO_DEEP
    return bool(deeper)


def _keys(outer: Any) -> Any:
    return outer.keys() if isinstance(outer, dict) else range(len(outer))


def _values(outer: Any) -> Any:
    return outer.values() if isinstance(outer, dict) else outer


def with_items(page: Any) -> Any:
    """The same list; one of metadata that is empty has `null` instead of items."""
    page["items"] = page.get("items") or []
    return page


@dataclass
class PageSize:
    """Number of objects to ask for: fewer after a page that was too large, more again after small ones."""

    most: int
    count: int = 0

    def __post_init__(self) -> None:
        self.count = self.count or self.most

    @property
    def bytes_max(self) -> int | None:
        return PAGE_BYTES_MAX if self.count > 1 else None

    def was(self, size_bytes: int | None) -> None:
        """None: too large."""
        if size_bytes is None:
            self.count = max(1, self.count // 4)
        elif size_bytes * 4 < PAGE_BYTES_MAX:
            self.count = min(self.most, self.count * 2)


async def content_within(response: Any, bytes_max: int | None) -> bytes | None:
    """The body of an aiohttp response; None, and a closed connection, when it is longer than that."""
    if bytes_max is None:
        return bytes(await response.read())
    content = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        content += chunk
        if len(content) > bytes_max:
            response.close()
            return None
    return bytes(content)


async def lines(content: Any, bytes_max: int) -> AsyncIterator[bytes]:
    """Yield lines of aiohttp's stream without their ends. A longer one comes in pieces of `bytes_max`: what writes a log may never end its
    line.
    """
    rest = bytearray()
    async for data in content.iter_any():
        rest += data
        *whole, rest = rest.split(b"\n") if b"\n" in data else (rest,)
        for line in whole:
            yield bytes(line)
        while len(rest) > bytes_max:
            yield bytes(rest[:bytes_max])
            del rest[:bytes_max]
    if rest:
        yield bytes(rest)
