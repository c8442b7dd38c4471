"""A short run on the terminal: what goes on, and how Ctrl-C ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.terminal import waiting

if TYPE_CHECKING:
    from lockstep.platforms.jobs.shortresults import ShortRuns

T = TypeVar("T")


def result_of(runs: ShortRuns, make: Callable[[ShortRuns], Coroutine[Any, Any, T]], what: str = "") -> T:
    """Return the result of a short run; say that `what` goes on, if the run is silent; on Ctrl-C, say what is left, and exit with 130."""
    with exiting_on_ctrl_c(f"lockstep: interrupted; {runs.left}"), waiting(what) if what and runs.silent else nullcontext():
        return asyncio.run(make(runs))
