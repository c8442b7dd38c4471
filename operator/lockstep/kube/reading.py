"""Reads what the API server sends, so that no object can stop the reader: neither by its depth, nor by its size, nor by its number.

Kubernetes takes JSON of 10,000 levels; Python's parser gives up at about a thousand (RecursionError), and with it a whole list or watch.
A page of a list is limited by the number of its objects only, each of which may have 1.5 MB.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit, urlunsplit

from lockstep.api.objects import DEPTH_MAX, TOO_DEEP

log = logging.getLogger("lockstep.operator")
PAGE_BYTES_MAX = 1 << 20
"""Size of one page of a list: parsed, it may take 24 times as much. One object alone is read whatever its size, which the API server
limits.
"""
LEVELS_MAX = DEPTH_MAX + 3
"""Depth of what is read: a list of objects has two levels above them. An object that is too deep stays so; whoever keeps it reports it."""
PLAIN_LEVELS = 256
"""No line of a watch with fewer brackets is too deep for kopf's parser. Most have fewer; others are parsed and cut here."""
SLIM_BYTES = 128 << 10
"""Size above which only what is kept of an object goes on to kopf, which may have many at a time."""
CHUNK_BYTES = 1 << 18
WATCH_ERROR_SECONDS = 5.0
"""Wait before a watch that failed lists again."""
FORBIDDEN_SECONDS = 30.0
"""Wait before a list that is forbidden is asked for again: a right that an administrator takes away may come back."""
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


class BoundedSession:
    """An aiohttp session for kopf, which lists and watches with it: pages bounded by their size, nothing too deep, metadata where that is
    enough.

    kopf asks for nothing else. It takes such a session from a login handler (kopf.AiohttpSession), and uses what stands here.
    """

    def __init__(
        self,
        session: Any,
        metadata_only: frozenset[str],
        free_form: frozenset[str],
        seen: Callable[[str], None] = lambda plural: None,
        slim: Callable[[str, Any], Any] = lambda plural, item: item,
        taken: Mapping[str, Callable[[str | None, Any], None]] = MappingProxyType({}),
        listed: Callable[[], None] = lambda: None,
    ) -> None:
        """The sets hold plurals: of which kinds only metadata is needed, and which may have fields of any depth. `seen` is told of every
        sign of life, `listed` of every page of a list, empty ones too: the last object of a kind may be what was deleted while nobody
        watched. `slim` makes of an object, by its plural, what is kept of it. `taken`, by plural: who takes the objects of that kind (the
        event's type, None of a list's) in kopf's place, which gets their revisions only: with a task and four dicts an object it takes more
        time than everything else.
        """
        self._session = session
        self._metadata_only = metadata_only
        self._free_form = free_form
        self._seen = seen
        self._slim = slim
        self._taken = taken
        self._tell_of_list = listed
        self._sizes: dict[str, PageSize] = {}
        self._page = asyncio.Lock()

    @property
    def headers(self) -> Any:
        return self._session.headers

    @property
    def closed(self) -> bool:
        return bool(self._session.closed)

    async def close(self) -> None:
        await self._session.close()

    async def request(self, method: str, url: str, *, headers: dict[str, str] | None = None, **more: Any) -> Any:
        """`more`: as aiohttp's."""
        plural = urlsplit(url).path.rpartition("/")[2]
        self._seen(plural)
        query = parse_qs(urlsplit(url).query)
        is_watch = query.get("watch") == ["true"]
        accept = {"Accept": METADATA_EACH if is_watch else METADATA_LIST} if plural in self._metadata_only else {}
        sent = {**more, "headers": {**(headers or {}), **accept}}
        if not is_watch:
            while (response := await self._listed(method, url, plural, sent)).status == HTTPStatus.FORBIDDEN:
                response.close()  # kopf would end this watch, and never begin it again
                await asyncio.sleep(FORBIDDEN_SECONDS)
                self._seen(plural)
            return response
        since = query.get("resourceVersion", ["0"])[0]
        if since != "0" and await self._has_gone_back(method, url, since, sent["headers"]):
            return _Gone("the API server is at an earlier revision than before")
        response = await self._session.request(method=method, url=url, **sent)
        if response.status == HTTPStatus.FORBIDDEN:
            response.close()
            return _Gone("a watch is forbidden")
        if response.status >= 400:
            return response
        return _Watched(
            response, plural in self._free_form, lambda: self._seen(plural), lambda item: self._slim(plural, item), self._taken.get(plural)
        )

    async def _listed(self, method: str, url: str, plural: str, sent: dict[str, Any]) -> Any:
        async with self._page:  # two pages at once would take twice the memory
            while True:
                limit = int(parse_qs(urlsplit(url).query).get("limit", ["100"])[0])
                size = self._sizes.setdefault(plural, PageSize(limit))
                response = await self._session.request(method=method, url=_with(url, limit=str(size.count)), **sent)
                if response.status >= 400:
                    return response
                content = await content_within(response, size.bytes_max)
                size.was(None if content is None else len(content))
                if content is not None:
                    return _Listed(self._passed_on(plural, with_items(loads(content)), len(content)))

    def _passed_on(self, plural: str, page: Any, size_bytes: int) -> Any:
        """Return what kopf gets of a page."""
        self._tell_of_list()
        if plural in self._taken:
            for item in page["items"]:
                self._taken[plural](None, item)
            return {**page, "items": []}
        if size_bytes > SLIM_BYTES * max(1, len(page["items"])):
            page["items"] = [self._slim(plural, item) for item in page["items"]]
        return page

    async def _has_gone_back(self, method: str, url: str, since: str, headers: dict[str, str]) -> bool:
        """Return True if the API server is at an earlier revision than the watch: its store was restored, and nothing would come for
        long.
        """
        listing = _with(url, watch=None, resourceVersion=None, allowWatchBookmarks=None, timeoutSeconds=None, limit="1")
        accept = {"Accept": METADATA_LIST}
        response = await self._session.request(method=method, url=listing, headers={**headers, **accept})
        async with response:
            if response.status >= 400:
                return False  # the watch itself meets the same trouble, which kopf knows to handle
            version = str(loads(await response.read())["metadata"].get("resourceVersion", ""))
        return version.isdigit() and since.isdigit() and int(version) < int(since)


def _with(url: str, **changes: str | None) -> str:
    """The URL with other values in its query; None: without that name."""
    parts = urlsplit(url)
    pairs = [(name, value) for name, value in parse_qsl(parts.query) if name not in changes]
    pairs += [(name, value) for name, value in changes.items() if value is not None]
    return urlunsplit(parts._replace(query=urlencode(pairs)))


class _Reply:
    """Response as kopf uses it: it looks at the status, enters it and closes it."""

    status = 200

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        return


class _Listed(_Reply):
    """A page."""

    def __init__(self, page: Any) -> None:
        self._page = page

    async def json(self) -> Any:
        return self._page


_EXPIRED = 410
_RELIST = {"type": "ERROR", "object": {"kind": "Status", "code": _EXPIRED, "reason": "Expired", "message": "list again"}}
"""After this event kopf lists again, instead of ending the process as after any other error."""


class _Gone(_Reply):
    """A watch that ends at once, and is to begin with a list."""

    def __init__(self, why: str) -> None:
        self._why = why

    @property
    def content(self) -> _Gone:
        return self

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        log.warning("%s: everything of its kind is listed again", self._why)
        await asyncio.sleep(WATCH_ERROR_SECONDS)
        yield json.dumps(_RELIST).encode() + b"\n"


class _Watched(_Reply):
    """A watch's stream, line by line."""

    def __init__(
        self,
        response: Any,
        is_free_form: bool,
        seen: Callable[[], None],
        slim: Callable[[Any], Any],
        take: Callable[[str, Any], None] | None = None,
    ) -> None:
        self._response = response
        self._take = take
        self._seen = seen
        self._slim = slim
        self._is_free_form = is_free_form

    def close(self) -> None:
        self._response.close()

    @property
    def content(self) -> _Watched:
        return self

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for line in _lines(self._response.content, size):
            self._seen()
            yield await (self._checked(line) if self._take is None else self._taken(line, self._take)) + b"\n"

    async def _taken(self, line: bytes, take: Callable[[str, Any], None]) -> bytes:
        """A bookmark in the event's place."""
        event = _event(line)
        if event["type"] == "ERROR":
            return await self._failed(event)
        version = event["object"]["metadata"]["resourceVersion"]
        if event["type"] != "BOOKMARK":
            take(event["type"], event["object"])
        return json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}).encode()

    async def _checked(self, line: bytes) -> bytes:
        """Nothing in it too deep or too large. Every kind has a field of any depth: whoever may write an object may write its
        metadata.managedFields.
        """
        if b'"type":"ERROR"' in line[:100]:
            return await self._failed(_event(line))
        is_large = len(line) > SLIM_BYTES
        if not is_large and line.count(b"{") + line.count(b"[") <= (DEPTH_MAX if self._is_free_form else PLAIN_LEVELS):
            return line
        event = _event(line)
        if is_large and event["type"] != "ERROR":
            event["object"] = self._slim(event["object"])
        return json.dumps(event).encode()

    async def _failed(self, event: Any) -> bytes:
        """Whatever the error is: a new list and a new watch know all that this one has lost."""
        if event["object"].get("code") != _EXPIRED:
            log.warning("a watch failed: %s; everything of its kind is listed again", event["object"].get("message", ""))
            await asyncio.sleep(WATCH_ERROR_SECONDS)
        return json.dumps(_RELIST).encode()


def _event(line: bytes) -> Any:
    """Return what a line of a watch says; what is no JSON asks for a new list."""
    try:
        return loads(line)
    except ValueError as error:
        log.warning("a watch sent what is no JSON: %s", error)
        return _RELIST


async def _lines(content: Any, size: int) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for chunk in content.iter_chunked(size):
        begin = len(rest)
        rest += chunk
        end = rest.rfind(b"\n", begin)
        if end < 0:
            continue
        whole, rest = bytes(rest[:end]), rest[end + 1 :]
        for line in whole.split(b"\n"):
            if line.strip():
                yield line
    if rest.strip():
        yield bytes(rest)
