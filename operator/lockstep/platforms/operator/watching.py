"""Watch the cluster by kopf, with a middleware that reads the objects, and kopf's defaults but for those below.

docs/contributing/replicas.md ("What kopf does") has the figures behind each line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import repeat
from typing import Any

import kopf
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

from lockstep.api.objects import Object
from lockstep.kube.aim import Connections
from lockstep.kube.connection import headers_of, server_of, session_to
from lockstep.kube.kinds import KINDS, type_meta
from lockstep.kube.reading import EVENT_BYTES_MAX, METADATA_EACH, lines, loads
from lockstep.platforms.operator.memory.inventory import Watched

NOTHING = "lockstep.dev/job,!lockstep.dev/job"
"""A selector of no object: of a list, kopf needs the revision from which to watch."""
log = logging.getLogger("lockstep.operator")


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


def registry(
    kinds: Iterable[Watched], observe: Callable[[str, Object, bool], None], missed: Callable[[], None], goes_on: Callable[[str], None]
) -> kopf.OperatorRegistry:
    """Return kopf's login, and the kinds that it watches. `observe` gets a kind, an object, and True if it was deleted; `goes_on` the
    plural of a kind at every sign of life of its watch; `missed` is called when a watch begins with a list, and when no API server answers.
    """
    handlers, by_plural = kopf.OperatorRegistry(), {KINDS[one.kind].plural: one for one in kinds}

    async def read_events(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        if (watched := by_plural.get(plural := request.url.name)) is None:
            return await handler(request)

        def take(type: str, item: Object) -> None:
            goes_on(plural)
            if type != "BOOKMARK":
                observe(watched.kind, item | type_meta(watched.kind), type == "DELETED")

        is_watch, response = "watch" in request.url.query, None
        request.url = request.url.update_query(watched.query if is_watch else {"labelSelector": NOTHING})
        if is_watch and watched.metadata_only:
            request.headers["Accept"] = METADATA_EACH
        goes_on(plural)
        try:
            response = await handler(request)
        finally:
            if not is_watch or response is None or response.status >= 500:
                missed()
        if is_watch and response.ok:
            response.content = Events(response.content, take)  # type: ignore[assignment]
        return response

    @kopf.on.login(registry=handlers)  # type: ignore[untyped-decorator]
    async def login(**_: Any) -> kopf.AiohttpSession:
        """Read KUBECONFIG or ~/.kube/config, else the pod's service account; again after a 401. Raises ConfigError."""
        server = server_of(Connections())
        session = session_to(server, headers=await headers_of(server), proxy=server.proxy, limit=0, middlewares=[read_events])
        return kopf.AiohttpSession(server=server.url, aiohttp_session=session)

    for plural, one in by_plural.items():
        kopf.on.event(KINDS[one.kind].api_version, plural, registry=handlers)(lambda **_: None)  # never called: `take` has the events
    return handlers


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # no watch of CRDs and namespaces, which needs rights
    settings.networking.connect_timeout = 10.0
    settings.networking.error_backoffs = repeat(10.0)  # forever: a right that an administrator takes away may come back
    return settings
