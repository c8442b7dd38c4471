"""Tells the end of jobs: one POST to the URL in a Secret of the job's namespace, repeated for a while until it is heard.

The operator makes this call for people who may write jobs, so it must be of no use for reaching what they can't: a fixed body, no redirects,
nothing of the answer but its code, no link-local address (also none that a name resolves to). The URL is a secret and is never logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from lockstep.api.names import NOTIFY_SECRET, OPERATOR_NAME
from lockstep.kube.cluster import FORBIDDEN, ApiError, Cluster
from lockstep.plan.observed import Delivery, Observed
from lockstep.plan.reconcile.notify import Message, due_message, is_forbidden, next_try, url_problem
from lockstep.platforms.operator.memory.queue import Key

TRY_SECONDS = 10.0
AT_ONCE, OF_A_NAMESPACE = 64, 2
"""Tries under way together, and those of one namespace: receivers that never answer delay their own namespace only."""
URL_CHARACTERS = 4096
OFF = "not sent: this cluster's administrator has turned webhooks off"
log = logging.getLogger("lockstep.operator")


class Undelivered(Exception):
    """One try failed. The message may be shown: it has nothing of the URL in it."""


class Notifier:
    """`heard` is called with a job's key when the outcome of its message is known. Ends with the process."""

    def __init__(
        self, cluster: Cluster, heard: Callable[[Key], None], *, enabled: bool = True, now: Callable[[], float] = time.time
    ) -> None:
        self._cluster = cluster
        self._heard = heard
        self._enabled = enabled
        self._now = now
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._deliveries: dict[str, Delivery] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self._own_places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphores by namespace, as long as one of its messages is on its way."""

    def delivery(self, uid: str) -> Delivery | None:
        """Delivery of the newest notification about the job of this uid, as far as this process knows."""
        return self._deliveries.get(uid)

    def look(self, observed: Observed) -> None:
        """Begin to tell the job's end, if that is due and nobody is at it."""
        message = due_message(observed)
        delivery = self._deliveries.get(observed.uid)
        if message is None or observed.uid in self._tasks or (delivery is not None and delivery.id == message.id):
            return
        key = (observed.namespace, observed.name)
        task = asyncio.ensure_future(self._tell(key, observed.uid, message))
        self._tasks[observed.uid] = task
        task.add_done_callback(lambda _: self._tasks.pop(observed.uid, None))

    def forget(self, uids: set[str]) -> None:
        """Keep what is known of these jobs only."""
        self._deliveries = {uid: delivery for uid, delivery in self._deliveries.items() if uid in uids}

    async def _tell(self, key: Key, uid: str, message: Message) -> None:
        delivery = await self._delivered(key, message) if self._enabled else Delivery(message.id, delivered=False, attempts=0, message=OFF)
        log.info("%s/%s: notification: %s", *key, delivery.message)
        self._deliveries[uid] = delivery
        self._heard(key)

    async def _delivered(self, key: Key, message: Message) -> Delivery:
        attempts = 0
        own_places = self._own_places.setdefault(key[0], asyncio.Semaphore(OF_A_NAMESPACE))
        while True:
            attempts += 1
            try:
                async with own_places, self._places:
                    await self._try(key[0], message)
            except Undelivered as error:
                wait = next_try(attempts, message.ended, self._now())
                if wait is None:
                    return Delivery(message.id, delivered=False, attempts=attempts, message=f"not delivered in {attempts} tries: {error}")
                await asyncio.sleep(wait)
            else:
                return Delivery(message.id, delivered=True, attempts=attempts, message="delivered")

    async def _try(self, namespace: str, message: Message) -> None:
        """Raises Undelivered."""
        url = await self._url(namespace, message)
        problem = url_problem(url)
        if problem is not None:
            raise Undelivered(problem)
        try:
            status = await _post(url, message)
        except TimeoutError:
            raise Undelivered(f"no answer within {TRY_SECONDS:.0f} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Undelivered(_trouble(error)) from None
        if not 200 <= status < 300:
            raise Undelivered(f"the receiver answered {status}" + (", and redirects are not followed" if 300 <= status < 400 else ""))

    async def _url(self, namespace: str, message: Message) -> str:
        """Read the URL at every try: it may be corrected meanwhile. Raises Undelivered."""
        try:
            secret = await self._cluster.get("Secret", namespace, message.secret)
        except (ApiError, OSError) as error:
            if isinstance(error, ApiError) and error.status == FORBIDDEN:
                raise Undelivered(
                    f"the operator may not read Secret {message.secret} of namespace {namespace}: call it {NOTIFY_SECRET}, "
                    f"or let ServiceAccount {OPERATOR_NAME} get it by a Role"
                ) from None
            raise Undelivered(f"Secret {message.secret} can't be read now") from None
        encoded = ((secret or {}).get("data") or {}).get(message.key)
        if encoded is None:
            raise Undelivered(f"there is no key {message.key} in a Secret {message.secret} of namespace {namespace}")
        return b64decode(encoded).decode(errors="replace").strip()[:URL_CHARACTERS]


async def _post(url: str, message: Message) -> int:
    connector = aiohttp.TCPConnector(resolver=SafeResolver(), force_close=True)
    timeout = aiohttp.ClientTimeout(total=TRY_SECONDS)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.post(url, json=message.body, headers={"Lockstep-Notification-Id": message.id}, allow_redirects=False) as answer,
    ):
        return answer.status


class SafeResolver(AbstractResolver):
    """Names as the system knows them, without link-local addresses: the address that is checked is the one that is used."""

    def __init__(self) -> None:
        self._system = ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        results = await self._system.resolve(host, port, family)
        allowed = [each for each in results if not is_forbidden(each["host"].partition("%")[0])]
        if not allowed:
            raise OSError(None, "the name stands for a link-local address")
        return allowed

    async def close(self) -> None:
        await self._system.close()


def _trouble(error: Exception) -> str:
    """Return what went wrong, without host or path."""
    inner: Any = getattr(error, "os_error", error)
    if isinstance(error, (aiohttp.ClientConnectorCertificateError, ssl.SSLError)) or isinstance(inner, ssl.SSLError):
        return "the receiver's certificate is not valid"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host's name can't be resolved"
    if isinstance(inner, OSError) and inner.errno is not None:
        return f"no connection: {_ERRNO.get(inner.errno, 'errno ' + str(inner.errno))}"
    return f"no connection: {type(error).__name__}"


_ERRNO: Mapping[int, str] = {111: "refused", 113: "no route to the host", 101: "the network is unreachable", 104: "reset"}
