"""Keys that need work: each is worked on by one worker at a time, as often as it was marked, and again later when the work failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_MAX_SECONDS = 60.0
log = logging.getLogger(__name__)

Key = tuple[str, str]
"""(namespace, name) of a job."""
Work = Callable[[Key], Awaitable[float | None]]
"""Returns in how many seconds to come back without being told, or None."""


class WorkQueue:
    """Marks are cheap and never lost: a key marked while it is worked on is worked on again. Marks of one key collapse."""

    def __init__(self, work: Work, workers: int = 4) -> None:
        self._work = work
        self._workers = workers
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._running: set[Key] = set()
        self._marked_while_running: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._waiters: dict[Key, list[asyncio.Future[None]]] = {}

    def mark(self, key: Key) -> None:
        """This key's objects may have changed."""
        self._cancel_timer(key)
        if key in self._running:
            self._marked_while_running.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._waiting)

    async def worked(self, key: Key) -> None:
        """Mark it, and return when it has been worked on since, without a failure."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(waiter)
        self.mark(key)
        await waiter

    def mark_later(self, key: Key, seconds: float) -> None:
        """As `mark`, after a while; an earlier mark or timer of the key is enough."""
        when = asyncio.get_running_loop().time() + seconds
        timer = self._timers.get(key)
        if timer is None or timer.when() > when:
            self._cancel_timer(key)
            self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.mark, key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._serve())
        finally:
            for key in list(self._timers):
                self._cancel_timer(key)

    async def _serve(self) -> None:
        while True:
            key = await self._ready.get()
            self._waiting.discard(key)
            self._running.add(key)
            await self._attempt(key)
            self._running.discard(key)
            if key in self._marked_while_running:
                self._marked_while_running.discard(key)
                self.mark(key)

    async def _attempt(self, key: Key) -> None:
        waiters = [waiter for waiter in self._waiters.pop(key, []) if not waiter.done()]
        try:
            again = await self._work(key)
        except Exception as error:
            if waiters:
                self._waiters[key] = waiters + self._waiters.get(key, [])
            failures = self._failures.get(key, 0)
            self._failures[key] = failures + 1
            again = max(min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2**failures), getattr(error, "retry_after_seconds", 0.0))
            log.warning("%s/%s: %s: %s; again in %.2f s", *key, type(error).__name__, error, again)
        else:
            self._failures.pop(key, None)
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if again is not None:
            self.mark_later(key, again)
