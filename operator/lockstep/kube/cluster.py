"""One small asynchronous client for plain dicts: what is sent is what was rendered, and nothing is discovered or typed on the way."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import urlencode

from lockstep.api.errors import Failed
from lockstep.api.objects import Object
from lockstep.kube.aim import Connections, Kubeconfig
from lockstep.kube.clock import ServerClock, boot_seconds
from lockstep.kube.connection import ApiConnection, server_of
from lockstep.kube.kinds import path_of, type_meta
from lockstep.kube.reading import EVENT_BYTES_MAX, METADATA_EACH, METADATA_LIST, PageSize, content_within, lines, loads, with_items

T = TypeVar("T")
FIELD_MANAGER = "lockstep-operator"
LOG_LINE_BYTES_MAX = 1 << 18
PING_SECONDS = 30.0  # proxies in front of API servers cut connections that are silent for a minute
JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
DRY_RUN = {"dryRun": "All"}
_HALVES, _ESCAPED = re.compile("[\ud800-\udfff]"), re.compile("[\x7f-\uffff]")
_WARNING = re.compile(r'^\d{3} \S+ "(.*)"$')
RETRY_AFTER_MAX_SECONDS = 60.0
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, INVALID = 401, 403, 404, 409, 422
TOO_LARGE, TOO_MANY_REQUESTS, INTERNAL_ERROR = 413, 429, 500
OUTAGE_SECONDS = 15.0
"""Seconds without an answer that are an outage. The replicas ask for their Lease every few seconds, and a kubelet that is heard again after
that is not late yet.
"""
_REFUSALS = frozenset({400, FORBIDDEN, TOO_LARGE, INVALID})
_TOO_LARGE = re.compile("^etcdserver: request is too large|trying to send message larger than max")
"""The API server passes on what its store says as 500, as if asking again could help."""


@dataclass
class ApiError(Failed):
    """The API server refused a request. `message` is its own."""

    status: int
    reason: str
    message: str
    retry_after_seconds: float = 0.0
    """Time that the API server asks to be left alone (429, 503)."""

    def __str__(self) -> str:
        return f"{self.message} ({self.status} {self.reason})"

    @property
    def is_too_large(self) -> bool:
        """The object is larger than a request or the store takes."""
        return self.status == TOO_LARGE or (self.status >= 500 and _TOO_LARGE.search(self.message) is not None)

    @property
    def is_refusal(self) -> bool:
        """The request is at fault, or a quota or an admission rule: asking again won't help before something changes."""
        return self.status in _REFUSALS or self.is_too_large

    @property
    def is_overload(self) -> bool:
        """The API server can't answer now: asking again may help."""
        return not self.is_refusal and (self.status >= INTERNAL_ERROR or self.status == TOO_MANY_REQUESTS)


class tolerated(AbstractContextManager[None, bool]):
    """Pass over a refusal that has one of these statuses."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = statuses

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, ApiError) and error.status in self.statuses


_RIGHT = re.compile(r'cannot \w+ resource "[^"]+"( in API group "[^"]*")?')
"""Words that the authorizer always uses, and no admission plug-in."""
_LACK_OF = re.compile(r"(?<=/namespaces/)[^/]+|(?<=trainingjobs/)[^/]+")
"""Names in a path: where a right is lacking it is for all of them."""


class Unreachable(Failed, OSError):
    """The API server doesn't answer, or the connection to it broke."""

    @property
    def is_untrusted(self) -> bool:
        """The API server's certificate is not signed by an authority that this machine trusts."""
        from aiohttp import ClientConnectorCertificateError

        return isinstance(self.__cause__, ClientConnectorCertificateError)


class Answers:
    """Answers to the newest requests, for a health check. Times are time.monotonic."""

    def __init__(self, uptime: Callable[[], float] = boot_seconds) -> None:
        self._uptime = uptime
        self._answered: float | None = None
        self.back_since: float | None = None
        """Time at which the API server first answered after it had not for OUTAGE_SECONDS, or ever, by `uptime`: a machine that slept has
        missed as much.
        """
        self.refused_since: float | None = None
        """Time since which the API server does nothing but refuse the credentials, or shows a certificate that isn't trusted."""
        self.is_answering = True
        self._lacks: dict[str, tuple[float, str]] = {}

    def lacks(self, what: str, message: str) -> None:
        """Note that a request of this kind was refused for want of a right."""
        since = self._lacks[what][0] if what in self._lacks else time.time()
        self._lacks[what] = since, message

    def may(self, what: str) -> None:
        """Note that a request of this kind was not refused for that."""
        self._lacks.pop(what, None)

    @property
    def lack(self) -> tuple[float, str] | None:
        """The right that has been lacking for longest: since when (Unix time), in the API server's words; None: none is."""
        return min(self._lacks.values(), default=None)

    def heard(self, code: int, *, is_untrusted: bool = False) -> None:
        """`code`: 0 for no answer."""
        self.is_answering = code != 0
        if 0 < code < INTERNAL_ERROR:
            now = self._uptime()
            if self._answered is None or now - self._answered > OUTAGE_SECONDS:
                self.back_since = now
            self._answered = now
        if code == UNAUTHORIZED or is_untrusted:
            self.refused_since = time.monotonic() if self.refused_since is None else self.refused_since
        elif code:
            self.refused_since = None

    def back_seconds(self) -> float:
        """Seconds for which it has answered since its last outage; 0: it has not yet."""
        return 0.0 if self.back_since is None else self._uptime() - self.back_since


def _is_needed_for_statuses(method: str, path: str) -> bool:
    """Lists of the whole cluster, reviews of reports, and the statuses themselves. What a namespace refuses is that namespace's."""
    return "/namespaces/" not in path or (method != "GET" and "/trainingjobs/" in path)


def _object_path(item: Object, *, collection: bool = False, subresource: str = "") -> str:
    metadata = item["metadata"]
    name = None if collection else metadata["name"]
    return path_of(item["kind"], metadata.get("namespace"), name, subresource)


class Cluster:
    """A connection to one API server. Use `async with`."""

    def __init__(self, connection: ApiConnection) -> None:
        self._connection = connection
        self._check: Callable[[], None] = lambda: None
        self.requested: Callable[[str, str, int], None] = lambda method, path, code: None
        """Told of every request, with 0 for a server that could not be reached."""
        self.clock = ServerClock()
        self.answers = Answers()

    def fenced(self, check: Callable[[], None]) -> Cluster:
        """The same connection, where `check` is called before everything that isn't a GET, and may raise."""
        fenced = Cluster(self._connection)
        fenced._check = check
        fenced.requested, fenced.clock, fenced.answers = self.requested, self.clock, self.answers
        return fenced

    @property
    def namespace(self) -> str | None:
        """The namespace that the kubeconfig's context names."""
        return self._connection.server.namespace

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self._connection.server.url

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    @classmethod
    async def connect(cls, connections: Connections | None = None) -> Cluster:
        """Connect to the cluster aimed at, by default that of the kubeconfig, else as the pod's service account. Raises ConfigError."""
        return cls(ApiConnection(server_of(connections or Connections())))

    async def _send(
        self,
        method: str,
        path: str,
        body: object | None,
        *,
        query: Mapping[str, str],
        content_type: str = JSON,
        accept: str = JSON,
        seconds: float | None = 30,
    ) -> Any:
        if method != "GET":
            self._check()
        url = f"{path}?{urlencode(query)}" if query else path
        headers = {"Accept": accept, "User-Agent": FIELD_MANAGER, **({} if body is None else {"Content-Type": content_type})}
        text, code = body if body is None or isinstance(body, BytesIO) else _text_of(body), 0
        sent_at = boot_seconds()
        try:
            with _reaching(self.server):
                response = await self._connection.request(method, url, text, headers, seconds)
            code = response.status
            self.clock.heard(response.headers.get("Date"), sent_at)
        except Unreachable as error:
            self.answers.heard(0, is_untrusted=error.is_untrusted)
            raise
        finally:
            self.requested(method, path, code)
        self.answers.heard(response.status)
        what = f"{method} {_LACK_OF.sub('', path)}"
        if response.status >= 400:
            with _reaching(self.server):
                content = await response.read()
            refusal = _error(response.status, content, response.headers.get("Retry-After", ""))
            right = _RIGHT.search(refusal.message) if refusal.status == FORBIDDEN else None
            if right is not None and _is_needed_for_statuses(method, path):
                self.answers.lacks(what, right[0])
            raise refusal
        self.answers.may(what)
        return response

    async def request(
        self, method: str, path: str, body: object | None = None, query: Mapping[str, str] | None = None, content_type: str = JSON
    ) -> Object:
        """The reply's object. Raises ApiError, and OSError when the server can't be reached."""
        return await self._object(await self._send(method, path, body, query=query or {}, content_type=content_type))

    async def _object(self, response: Any) -> Object:
        with _reaching(self.server):
            return self._parsed(await response.read())

    def _parsed(self, content: bytes) -> Object:
        try:
            reply: Object = loads(content)
        except ValueError as error:
            raise Unreachable(f"{self.server} sent something that is not JSON: {error}") from None
        return reply

    async def document(self, path: str, media_type: str) -> Object:
        """JSON that is no object of the API and has a media type of its own. Raises as `request` does."""
        response = await self._send("GET", path, None, query={}, accept=media_type)
        with _reaching(self.server):
            reply: Object = json.loads(await response.read())
        return reply

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        with tolerated(NOT_FOUND):
            return await self.request("GET", path_of(kind, namespace, name))
        return None

    async def exists(self, kind: str, namespace: str | None, name: str) -> bool:
        """Return True if it exists. Its content is not read: a Secret's values stay where they are."""
        with tolerated(NOT_FOUND):
            (await self._send("GET", path_of(kind, namespace, name), None, query={}, accept=METADATA_EACH)).release()
            return True
        return False

    async def try_out(self, item: Object, *, apply: bool = False) -> tuple[Object, list[str]]:
        """`item` as the API server would store it if it were created (or applied), which it isn't, and what it warns of. Raises ApiError
        where it would be refused.
        """
        if apply:
            query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict", **DRY_RUN}
            response = await self._send("PATCH", _object_path(item), item, query=query, content_type=APPLY)
        else:
            response = await self._send("POST", _object_path(item, collection=True), item, query=DRY_RUN)
        stored = await self._object(response)
        stated = response.headers.getall("Warning", [])
        return stored, [match[1].replace('\\"', '"') for text in stated if (match := _WARNING.match(text))]

    async def list(self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None) -> Object:
        """All objects as one List; items get their kind and apiVersion."""
        pages = [page async for page in self.pages(kind, namespace, query)]
        return {**pages[-1], "items": [item for page in pages for item in page["items"]]}

    async def pages(
        self,
        kind: str,
        namespace: str | None = None,
        query: Mapping[str, str] | None = None,
        limit: int = 500,
        *,
        metadata_only: bool = False,
        bounded: bool = False,
    ) -> AsyncIterator[Object]:
        """The same as Lists of at most `limit` items, of one and the same resourceVersion.

        `metadata_only`: of each object. `bounded`: fewer items where they are large (reading.PAGE_BYTES_MAX), so that memory for a page is
        bounded.
        """
        token: str | None = ""
        size = PageSize(limit)
        while token is not None:
            parameters = {"limit": str(size.count), **(query or {}), **({"continue": token} if token else {})}
            accept = METADATA_LIST if metadata_only else JSON
            response = await self._send("GET", path_of(kind, namespace), None, query=parameters, accept=accept)
            with _reaching(self.server):
                content = await content_within(response, size.bytes_max if bounded else None)
            if bounded:
                size.was(None if content is None else len(content))
            if content is None:
                continue
            page = with_items(self._parsed(content))
            del content
            for item in page["items"]:
                item.update(type_meta(kind))
            token = page["metadata"].get("continue") or None
            yield page

    async def create(self, item: Object) -> Object:
        return await self.request("POST", _object_path(item, collection=True), item, {"fieldManager": FIELD_MANAGER})

    async def apply(
        self, item: Object, *, subresource: str = "", manager: str = FIELD_MANAGER, strict: bool = False, dry_run: bool = False
    ) -> Object:
        """Server-side apply. With metadata.uid and resourceVersion in `item` another or a newer object is a conflict."""
        query = {"fieldManager": manager, "force": "true"} | ({"fieldValidation": "Strict"} if strict else {})
        query |= {"dryRun": "All"} if dry_run else {}
        return await self.request("PATCH", _object_path(item, subresource=subresource), item, query, APPLY)

    async def delete(self, kind: str, namespace: str | None, name: str, uid: str | None = None, grace_seconds: int | None = None) -> None:
        """Delete it in the background, if it is there (and is the one of that uid). `grace_seconds` 0: without asking its kubelet."""
        options: Object = {"propagationPolicy": "Background", **({"preconditions": {"uid": uid}} if uid else {})}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        with tolerated(NOT_FOUND):
            await self.request("DELETE", path_of(kind, namespace, name), options)

    async def watch(self, kind: str, namespace: str | None, query: Mapping[str, str]) -> AsyncIterator[Object]:
        """Events from now (or query's resourceVersion) until the server ends the stream."""
        response = await self._send("GET", path_of(kind, namespace), None, query={"watch": "true", **query}, seconds=3600)
        async for line in _lines(response, EVENT_BYTES_MAX):
            yield self._parsed(line)

    async def stream(
        self, path: str, query: Sequence[tuple[str, str]], protocols: Sequence[str], *, heartbeat: float | None = PING_SECONDS
    ) -> Any:
        """An open WebSocket (aiohttp's) to a pod's exec or portforward; pings keep it open through proxies. Raises ApiError, OSError."""
        from aiohttp import WSServerHandshakeError

        self._check()
        try:
            with _reaching(self.server):
                return await self._connection.websocket(f"{path}?{urlencode(query)}", protocols, heartbeat)
        except Unreachable as error:
            if isinstance(error.__cause__, WSServerHandshakeError):
                raise await self._why_refused(path, query, error.__cause__.status) from None
            raise

    async def _why_refused(self, path: str, query: Sequence[tuple[str, str]], status: int) -> ApiError:
        """Return why it was refused: a refused websocket has no body: the same request as a plain one tells why."""
        try:
            (await self._send("GET", f"{path}?{urlencode(query)}", None, query={})).release()
        except ApiError as error:
            return error if error.status == status else ApiError(status, error.reason, error.message)
        return ApiError(status, "", f"{path} can't be opened")

    async def upload(self, path: str, content: bytes, seconds: float) -> Object:
        """POST bytes as they are, for subresources that read a stream. The reply's object. Raises as `request` does."""
        octets = "application/octet-stream"
        return await self._object(await self._send("POST", path, BytesIO(content), query={}, content_type=octets, seconds=seconds))

    async def log(self, namespace: str, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        """Lines of a container's log; with follow=true until the container ends."""
        async for line in self.log_of(path_of("Pod", namespace, pod, "log"), {"container": container, **query}):
            yield line

    async def log_of(self, path: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        """Lines of whatever log stands at `path`."""
        response = await self._send("GET", path, None, query=query, seconds=None)  # a followed log ends with its container
        async for line in _lines(response, LOG_LINE_BYTES_MAX):
            yield line.decode(errors="replace")


class Client:
    """Client for blocking verbs: one request by itself, or one asynchronous piece of work, each on a connection of its own."""

    def __init__(self, connections: Connections | None = None, kubeconfig: Kubeconfig | None = None) -> None:
        """Read the kubeconfig: `kubeconfig`, else that of `connections`. Raises ConfigError when there is no cluster to talk to."""
        self._connections, self._stated = connections or Connections(), kubeconfig
        self._server = server_of(self._connections, kubeconfig)

    @property
    def kubeconfig(self) -> Kubeconfig:
        """Return the files that lead to the cluster."""
        return self._stated or self._connections.kubeconfig()

    def run(self, work: Callable[[Cluster], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`, done on a connection that ends with it."""

        async def done() -> T:
            async with self.connected() as cluster:
                return await work(cluster)

        return _run(done)

    def connected(self) -> Cluster:
        """Return a connection for work in an event loop of the caller's: use `async with`."""
        return Cluster(ApiConnection(self._server))

    def request(
        self, method: str, path: str, body: object | None = None, query: Mapping[str, str] | None = None, content_type: str = JSON
    ) -> Object:
        """Send one request by itself. Raises as `Cluster.request` does."""
        return self.run(lambda cluster: cluster.request(method, path, body, query, content_type))

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self._server.url


def _run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it as asyncio.run does; on a thread of its own for verbs that are in an event loop themselves."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    from lockstep.kube.threads import begin

    return begin(lambda: asyncio.run(make())).result()


@contextmanager
def _reaching(server: str) -> Iterator[None]:
    """Turn errors of aiohttp into Unreachable: a connection that breaks is an OSError: not all of aiohttp's errors are."""
    from aiohttp import ClientConnectorError, ClientError, ClientResponseError

    try:
        yield
    except ClientConnectorError as error:
        why = str(error.os_error).rpartition("] ")[2] or type(error.os_error).__name__
        raise Unreachable(f"{server} doesn't answer ({why})") from error
    except ClientResponseError as error:  # (whose text has the URL, and that of a proxy its password)
        raise Unreachable(f"the connection to {server} broke: {type(error).__name__}: {error.status} {error.message}") from error
    except ClientError as error:
        raise Unreachable(f"the connection to {server} broke: {type(error).__name__}: {error}") from error
    except TimeoutError as error:
        raise Unreachable(f"{server} doesn't answer in time") from error


async def _lines(response: Any, bytes_max: int) -> AsyncIterator[bytes]:
    try:
        async for line in lines(response.content, bytes_max):
            yield line
    finally:
        response.close()


def _text_of(body: object) -> str:
    """Return a body as the API server reads it, whether it takes it for JSON or, with apply, for YAML: what is stored then is what was
    sent.

    YAML knows no escapes of pairs (U+1F600), so what lies above U+FFFF stands as it is; and it refuses or changes some of the rest (U+0085,
    U+2028, U+FFFE) unless that is escaped. Half of a pair is no character: what can be stored is its escape as text.
    """
    text = _HALVES.sub(lambda half: f"\\\\u{ord(half[0]):04x}", json.dumps(body, ensure_ascii=False))
    return _ESCAPED.sub(lambda character: f"\\u{ord(character[0]):04x}", text)


def _error(status: int, body: bytes, retry_after: str) -> ApiError:
    seconds = min(float(retry_after), RETRY_AFTER_MAX_SECONDS) if retry_after.isdecimal() else 0.0
    try:
        reply = json.loads(body)
        return ApiError(status, str(reply.get("reason", "")), str(reply.get("message", "")), seconds)
    except (ValueError, AttributeError):
        return ApiError(status, "", body.decode(errors="replace").strip()[:500], seconds)
