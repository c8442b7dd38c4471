"""What the operator can't begin without is asked for until it is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lockstep.kube.cluster import ApiError

T = TypeVar("T")
log = logging.getLogger("lockstep.operator")
START_RETRY_SECONDS = 2.0


async def patiently(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """As often as it takes: a process that ended because the API server is away would only be started ever later."""
    while True:
        try:
            return await call()
        except (ApiError, OSError) as error:
            log.warning("%s: %s; again in %.0f s", what, error, START_RETRY_SECONDS)
            await asyncio.sleep(START_RETRY_SECONDS)
