"""Waits that hold up nothing else: for an event with a limit, and for work that a volume or a device may hold up for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def happens_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Return True if the event comes within so long (None: however long that takes). Not wait_for: that raises in two ways depending on
    Python's version.
    """
    waiting = asyncio.ensure_future(event.wait())
    done, _ = await asyncio.wait([waiting], timeout=seconds)
    waiting.cancel()
    return bool(done)


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Future of what `work` returns or raises. Its thread is a daemon, unlike those of `asyncio.to_thread`: the process may end before
    it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # (whatever it is, it is for whoever waits)
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
