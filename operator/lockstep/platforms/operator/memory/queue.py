"""Keys that need work: each is worked on by one worker at a time, as often as it was marked, and again later when the work failed.

Namespaces take turns, and none has more than half of the workers: a thousand jobs of one, whose writes are slow or refused, delay no
others. Not kopf's queue: it has a task for each object, neither turns nor a limit for a namespace, and waits as long after every failure.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from lockstep.kube.cluster import ApiError
from lockstep.plan.reconcile.status import SETTLE_SECONDS

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_MAX_SECONDS = 60.0
PATIENT_FAILURES = 3
"""Failures in a row after which a mark waits, too: what changed meanwhile has not helped."""
OBSTACLE_SECONDS = (3.0, 120.0)
"""Wait before a refused object is written again: first, and at most; doubled in between. A thousand jobs may meet one quota."""
SOON_SECONDS = 0.05
"""Seconds in which changes of a job collapse into one look at it: a start of 64 nodes is some 150 events."""
WORKERS = 16
JITTER = 0.25
"""Share of every wait that is random, up or down: a thousand jobs that one quota refuses don't come back together."""
START_RETRY_SECONDS = 2.0
"""Wait before the operator asks again for what it can't begin without."""
log = logging.getLogger(__name__)
T = TypeVar("T")

Key = tuple[str, str]
"""(namespace, name) of a job."""
Work = Callable[[Key], Awaitable[float | None]]
"""Returns in how many seconds to come back without being told, or None."""


class WorkQueue:
    """Marks are cheap and never lost: a key marked while it is worked on is worked on again. Marks of one key collapse."""

    def __init__(self, work: Work, workers: int = WORKERS) -> None:
        self._work = work
        self._workers = workers
        self._most = max(1, workers // 2)
        self._ready: dict[str, deque[Key]] = {}
        """Keys by namespace, in the order of their turns."""
        self._news = asyncio.Event()
        self._soon: set[Key] = set()
        self._soon_news = asyncio.Event()
        self._waiting: set[Key] = set()
        self._running: dict[Key, float] = {}
        self._busy: dict[str, int] = defaultdict(int)
        self._marked_while_running: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._waiters: dict[Key, list[asyncio.Future[None]]] = {}
        self.last_end = 0.0
        """Time at which a worker last ended a piece of work, by time.monotonic."""

    def mark(self, key: Key) -> None:
        """This key's objects may have changed."""
        if key in self._running:
            self._marked_while_running.add(key)
        elif key not in self._waiting:
            left = self._not_before.get(key, 0.0) - time.monotonic()
            if left > 0:
                self.mark_later(key, left)
                return
            self._not_before.pop(key, None)
            self._cancel_timer(key)
            self._waiting.add(key)
            self._ready.setdefault(key[0], deque()).append(key)
            self._news.set()

    def mark_soon(self, key: Key) -> None:
        """Mark the key together with what else happens in the next moment: for events of which many come at once."""
        self._soon.add(key)
        self._soon_news.set()

    async def _mark_collected(self) -> None:
        while True:
            await self._soon_news.wait()
            await asyncio.sleep(SOON_SECONDS)
            self._soon_news.clear()
            soon, self._soon = self._soon, set()
            for key in soon:
                self.mark(key)

    def hold(self, key: Key, seconds: float) -> None:
        """Marks wait for so long: the API server asked to be left alone, or the work has failed often."""
        self._not_before[key] = time.monotonic() + seconds

    def progressed(self, key: Key) -> None:
        """Work on it has achieved something: a failure after that is the first in a row."""
        self._failures.pop(key, None)

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._waiting)

    @property
    def longest_seconds(self) -> float:
        """Seconds since the oldest piece of work began."""
        return max((time.monotonic() - began for began in self._running.values()), default=0.0)

    async def worked(self, key: Key) -> None:
        """Mark it, and return when it has been worked on since, without a failure."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(waiter)
        self.mark(key)
        await waiter

    def mark_later(self, key: Key, seconds: float) -> None:
        """Mark the key after a while; an earlier mark or timer of the key is enough."""
        when = asyncio.get_running_loop().time() + seconds
        timer = self._timers.get(key)
        if timer is None or timer.when() > when:
            self._cancel_timer(key)
            self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._due, key)

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self._not_before.pop(key, None)
        self.mark(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def run(self) -> None:
        """Work until cancelled."""
        self.last_end = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._mark_collected())
                for _ in range(self._workers):
                    group.create_task(self._serve())
        finally:
            for key in list(self._timers):
                self._cancel_timer(key)

    def _next(self) -> Key | None:
        """Return a key of the namespace whose turn it is; its next turn comes after all others'."""
        for namespace, keys in self._ready.items():
            if self._busy[namespace] < self._most:
                key = keys.popleft()
                del self._ready[namespace]
                if keys:
                    self._ready[namespace] = keys
                return key
        return None

    async def _serve(self) -> None:
        while True:
            while (key := self._next()) is None:
                self._news.clear()
                await self._news.wait()
            self._waiting.discard(key)
            self._running[key] = time.monotonic()
            self._busy[key[0]] += 1
            try:
                again = await self._attempt(key)
            finally:
                self._ended(key)
            if key in self._marked_while_running:
                self._marked_while_running.discard(key)
                self.mark(key)
            if again is not None and key not in self._waiting:
                self.mark_later(key, again)

    def _ended(self, key: Key) -> None:
        self.last_end = time.monotonic()
        del self._running[key]
        self._busy[key[0]] -= 1
        if not self._busy[key[0]]:
            del self._busy[key[0]]
        self._news.set()

    async def _attempt(self, key: Key) -> float | None:
        """Work on the key; return the seconds until the next look, or None."""
        waiters = [waiter for waiter in self._waiters.pop(key, []) if not waiter.done()]
        try:
            again = await self._work(key)
        except Exception as error:
            if waiters:
                self._waiters[key] = waiters + self._waiters.get(key, [])
            failures = self._failures.get(key, 0)
            self._failures[key] = failures + 1
            requested = getattr(error, "retry_after_seconds", 0.0)
            again = max(jittered(min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2 ** min(failures, 16))), requested)
            if requested or failures >= PATIENT_FAILURES:
                self.hold(key, again)
            log.warning("%s/%s: %s: %s; again in %.2f s", *key, type(error).__name__, error, again)
        else:
            self._failures.pop(key, None)
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        return again


@dataclass(frozen=True)
class _Refused:
    wanted: object
    times: int
    until: float


class Refusals:
    """Writes that the API server refused, by job: quota, policy, a name that is taken, a size. They are tried again ever less often."""

    def __init__(self) -> None:
        self._refused: dict[Key, _Refused] = {}

    def left(self, key: Key, write: object) -> float:
        """Seconds until this may be sent again; 0: now, since it was not refused or is something else."""
        refused = self._refused.get(key)
        return max(0.0, refused.until - time.monotonic()) if refused is not None and refused.wanted == write else 0.0

    def refused(self, key: Key, write: object) -> float:
        """Note that it was refused; return the seconds until it may be sent again."""
        before = self._refused.get(key)
        times = before.times + 1 if before is not None and before.wanted == write else 0
        left = jittered(min(OBSTACLE_SECONDS[0] * 2 ** min(times, 16), OBSTACLE_SECONDS[1]))
        self._refused[key] = _Refused(write, times, time.monotonic() + left)
        return left

    def forget(self, key: Key) -> None:
        """Forget the refusal: the write was taken, or its obstacle may be gone."""
        self._refused.pop(key, None)

    def keep(self, firsts: set[str]) -> None:
        """Forget all keys but those that begin with one of these."""
        self._refused = {key: refused for key, refused in self._refused.items() if key[0] in firsts}


def jittered(seconds: float) -> float:
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 (no secret)


class DelayedWrites:
    """Changes of jobs' statuses that wait for what follows, by the job's uid."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def left(self, uid: str) -> float:
        """Seconds that the change may still wait; at most 0: it is to be written."""
        return self._since.setdefault(uid, self._clock()) + SETTLE_SECONDS - self._clock()

    def settled(self, uid: str) -> None:
        """There is nothing that waits."""
        self._since.pop(uid, None)

    def forget(self, uids: set[str]) -> None:
        """Keep these jobs only."""
        self._since = {uid: since for uid, since in self._since.items() if uid in uids}


async def patiently(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Return what `call` returns, tried as often as it takes: a process that ends because the API server is away is only started ever
    later.
    """
    while True:
        try:
            return await call()
        except (ApiError, OSError) as error:
            log.warning("%s: %s; again in %.0f s", what, error, START_RETRY_SECONDS)
            await asyncio.sleep(START_RETRY_SECONDS)
