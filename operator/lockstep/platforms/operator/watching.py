"""Watch the cluster by kopf, which finds the kinds, keeps each watch with its revision, logs in and tries again.

Its settings are its defaults but for those below, and objects are read on their way to kopf, by a middleware of the session that it is
given: docs/architecture.md has the figures behind each line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from http import HTTPStatus
from itertools import repeat
from typing import Any

import kopf
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object
from lockstep.kube.aim import Connections
from lockstep.kube.connection import headers_of, server_of, session_to
from lockstep.kube.kinds import KINDS, type_meta
from lockstep.kube.reading import EVENT_BYTES_MAX, METADATA_EACH, lines, loads
from lockstep.platforms.operator.memory.inventory import WATCHED, Watched

RETRY_SECONDS = 10.0
"""Wait between two tries of a request that failed, or that is forbidden: a right that an administrator takes away may come back."""
CONNECT_SECONDS = 10.0
RELIST_SECONDS = 1.0
"""Wait before a watch that failed begins anew."""
NOTHING = "lockstep.dev/job,!lockstep.dev/job"
"""A selector of no object: of a list, kopf needs the revision from which to watch."""
log = logging.getLogger("lockstep.operator")

Observe = Callable[[str, Object, bool], None]
"""(kind, object, whether it was deleted)"""


class WatchMiddleware:
    """Middleware of kopf's session. `observe` gets the objects; `goes_on` the plural of a kind at every sign of life of its watch. `missed`
    is called when a watch begins with a list, and when the API server is away: what is deleted meanwhile is in no event.
    """

    def __init__(self, observe: Observe, missed: Callable[[], None], goes_on: Callable[[str], None], kinds: Iterable[Watched]) -> None:
        self._observe = observe
        self._missed = missed
        self._goes_on = goes_on
        self._watched = {KINDS[one.kind].plural: one for one in kinds}

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        if (watched := self._watched.get(plural := request.url.name)) is None:
            return await handler(request)
        is_watch, status = "watch" in request.url.query, 0  # (no answer)
        if not is_watch:
            request.url = request.url.update_query(labelSelector=NOTHING)
        elif watched.metadata_only:
            request.headers["Accept"] = METADATA_EACH
        self._goes_on(plural)
        try:
            response = await handler(request)
            status = response.status
        finally:
            if not status or status >= HTTPStatus.INTERNAL_SERVER_ERROR or not is_watch:
                self._missed()
        if is_watch and status == HTTPStatus.OK:
            response.content = Events(response.content, partial(self._take, plural, watched.kind))  # type: ignore[assignment]
        return response

    def _take(self, plural: str, kind: str, type: str, item: Object) -> None:
        self._goes_on(plural)
        if type != "BOOKMARK":
            self._observe(kind, item | type_meta(kind), type == "DELETED")


class Events:
    """Stream of a watch. `take` gets each event, of any depth; kopf gets its revision, and 410 (list again) for an error or no event."""

    def __init__(self, content: Any, take: Callable[[str, Object], None]) -> None:
        self._content, self._take = content, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for line in lines(self._content, EVENT_BYTES_MAX):
            try:
                event = loads(line)
                type, item = event["type"], event["object"]
                revision = {"metadata": {"resourceVersion": item["metadata"]["resourceVersion"]}}
            except (ValueError, LookupError, TypeError):
                log.warning("a watch ends, and begins with a list: %s", line[:300])
                yield b'{"type": "ERROR", "object": {"code": 410}}\n'
                return
            self._take(type, item)
            yield json.dumps({"type": "BOOKMARK", "object": revision}).encode() + b"\n"


def registry(middleware: WatchMiddleware, kinds: Iterable[Watched]) -> kopf.OperatorRegistry:
    """Return kopf's login, and the kinds that it watches."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)  # type: ignore[untyped-decorator]
    async def login(**_: Any) -> kopf.AiohttpSession:
        """Read KUBECONFIG or ~/.kube/config, else the pod's service account; again after a 401. Raises ConfigError."""
        server = server_of(Connections())
        if server.tls_name is not None:
            raise ConfigError(
                "tls-server-name of the kubeconfig's cluster can't be used by the operator: name the server as its certificate does"
            )
        session = session_to(server, headers=await headers_of(server), proxy=server.proxy, limit=0, middlewares=[middleware])
        return kopf.AiohttpSession(server=server.url, aiohttp_session=session)

    async def handle(**_: Any) -> None:
        """Let kopf watch the kind: `middleware` takes its events."""

    for one in kinds:
        group, _, version = KINDS[one.kind].api_version.rpartition("/")
        kopf.on.event(group, version, KINDS[one.kind].plural, registry=handlers, id=one.kind)(handle)
    return handlers


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # no watch of CRDs and namespaces, which needs rights
    settings.networking.connect_timeout = CONNECT_SECONDS
    settings.networking.error_backoffs = repeat(RETRY_SECONDS)
    settings.watching.reconnect_backoff = RELIST_SECONDS
    for watched in WATCHED:
        settings.watching.label_selectors[KINDS[watched.kind].plural] = watched.label_selector
        settings.watching.field_selectors[KINDS[watched.kind].plural] = watched.field_selector
    return settings
