"""kopf as a watcher: it lists and watches, and calls one function with every event. Nothing of it is written into objects.

Its memory of what it handled is switched off: for change handlers, which we have none of, it copies every object four times at every event,
which took four times the processor time of all reconciles (1.45.2; `settings.persistence` is its documented place for that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import kopf

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object
from lockstep.kube.connection import headers_of, server_of, session_to
from lockstep.kube.kinds import KINDS, type_meta
from lockstep.kube.reading import BoundedSession
from lockstep.platforms.operator.memory.inventory import WATCHED, Watched
from lockstep.platforms.operator.memory.objects import FREE_FORM, slim

if TYPE_CHECKING:
    import kopf

LIST_ITEMS = 100
"""Objects of a list at a time: as dicts, 500 StatefulSets would take 30 MB, which the process would keep."""
IDLE_SECONDS = 0.05
"""Seconds that kopf keeps a task for an object after its last event: a list of thousands would be as many tasks for its default of 5 s."""

METADATA_ONLY = frozenset(KINDS[watched.kind].plural for watched in WATCHED if watched.metadata_only)
FREE_FORM_PLURALS = frozenset(KINDS[kind].plural for kind in FREE_FORM)

KIND_OF = {KINDS[watched.kind].plural: watched.kind for watched in WATCHED}

Listed = Callable[[], None]
Observe = Callable[[str, Object, bool], None]
"""(kind, object, whether it was deleted)"""


class NothingHandled(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Memory of no object: nobody knows what one was when it was last handled."""

    def build(self, **_: Any) -> Object:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """Progress of no handler: none is ever tried again."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Object) -> Object:
        return essence


def slimmed(plural: str, item: Object) -> Object:
    """Return what is kept of a watched object."""
    return slim(KIND_OF[plural], item) if plural in KIND_OF else item


def registry(observe: Observe, listed: Listed, goes_on: Callable[[str], None], kinds: Iterable[Watched] = WATCHED) -> kopf.OperatorRegistry:
    """kopf's handlers, the same for every watched kind. kopf calls those of jobs and clusters; `BoundedSession` hands over the objects of
    other kinds itself.

    `goes_on` is called with a plural whenever the watch of that kind shows a sign of life. `listed` is called with every page of a list. A
    list means that the watch started again, and such a watch never reports what was deleted before it.
    """
    handlers = kopf.OperatorRegistry()
    watched = list(kinds)

    taken = {KINDS[one.kind].plural: taker(one.kind, observe) for one in watched if one.kind not in FREE_FORM}

    @kopf.on.login(registry=handlers)  # type: ignore[untyped-decorator]
    async def login(**_: Any) -> kopf.AiohttpSession:
        session = await connection()
        return replace(
            session,
            aiohttp_session=BoundedSession(session.aiohttp_session, METADATA_ONLY, FREE_FORM_PLURALS, goes_on, slimmed, taken, listed),
        )

    for one in watched:
        _watch(handlers, one.kind, taker(one.kind, observe))
    return handlers


def taker(kind: str, observe: Observe) -> Callable[[str | None, Object], None]:
    """Returns what hands objects of this kind on to `observe`, those of lists too, whose items don't state their kind."""
    stated = type_meta(kind)

    def take(type: str | None, item: Object) -> None:
        observe(kind, item | stated, type == "DELETED")

    return take


def _watch(handlers: kopf.OperatorRegistry, kind: str, take: Callable[[str | None, Object], None]) -> None:
    api_kind = KINDS[kind]
    group, _, version = api_kind.api_version.rpartition("/")

    @kopf.on.event(group, version, api_kind.plural, registry=handlers, id=api_kind.plural)  # type: ignore[untyped-decorator]
    async def handle(type: str | None, body: kopf.Body, **_: Any) -> None:
        take(type, dict(body))


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # no watch of CRDs and namespaces
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NothingHandled()
    settings.persistence.progress_storage = NoProgress()
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = LIST_ITEMS
    for watched in WATCHED:
        plural = KINDS[watched.kind].plural
        if watched.label_selector:
            settings.watching.label_selectors[plural] = watched.label_selector
        if watched.field_selector:
            settings.watching.field_selectors[plural] = watched.field_selector
    return settings


async def connection() -> kopf.AiohttpSession:
    """KUBECONFIG or ~/.kube/config, else the pod's service account. The credential is asked for at every login, and kopf logs in again
    after a 401.

    Raises:
        ConfigError: there is no cluster to talk to, or kopf can't talk to it.
    """
    import kopf

    server = await server_of(None)
    if server.tls_name is not None:
        raise ConfigError(
            "tls-server-name of the kubeconfig's cluster can't be used by the operator: name the server as its certificate does"
        )
    session = session_to(server, headers=await headers_of(server), proxy=server.proxy, limit=0)
    return kopf.AiohttpSession(server=server.url, aiohttp_session=session)
