"""Calls that wait for an answer, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Return what `call`, which asks and waits for an answer, returns. Who gives up leaves it behind, so that Ctrl-C ends a verb though no
    server answers; after asyncio.to_thread the event loop would wait for it.
    """
    return await asyncio.wrap_future(begin(call))


def begin(call: Callable[[], T]) -> Future[T]:
    """Begin it in a thread that this process doesn't wait for at its end."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=copy_context().run, args=(work,), daemon=True).start()
    return future
