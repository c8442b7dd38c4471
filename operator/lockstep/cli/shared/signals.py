"""Ctrl-C, and SIGTERM and SIGHUP, which end a verb as Ctrl-C does, so that what it made in a cluster goes with it: a CI's timeout, a
terminal that is closed.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from lockstep.platforms.output import leave_terminal, tell
from lockstep_spec.exits import INTERRUPTED

NUMBERS = (signal.SIGTERM, signal.SIGHUP)
TOGETHER_SECONDS = 1.0
"""Signals within this time of the first are the same wish: `timeout` signals a process and then its group, and the second must not cut the
cleaning short."""


@contextmanager
def ending_like_ctrl_c() -> Iterator[list[int]]:
    """The signals that came meanwhile: none, or the one that ended the verb, after which no other changes the exit code. A later one cuts
    the cleaning short, as a second Ctrl-C does. One that this process was started to ignore (`nohup`) stays ignored.
    """
    received: list[int] = []
    first = 0.0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if received:
            if now - first > TOGETHER_SECONDS:
                _between_steps(_interrupt)
            return
        received.append(number)
        first = now
        if number == signal.SIGHUP:
            leave_terminal()
        ctrl_c = signal.getsignal(signal.SIGINT)
        if isinstance(ctrl_c, functools.partial):  # of asyncio.run: it cancels the main task, which cleans up
            _between_steps(functools.partial(ctrl_c, signal.SIGINT, frame))
        else:
            _between_steps(_interrupt)

    mine = threading.current_thread() is threading.main_thread()
    changed = [number for number in NUMBERS if mine and signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield received
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_IGN if received else signal.SIG_DFL)


@contextmanager
def exiting_on_ctrl_c(message: str = "") -> Iterator[None]:
    """Exit with 130, after a message on standard error, if Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        if message:
            tell(message)
        raise typer.Exit(INTERRUPTED) from None


def _between_steps(act: Callable[[], None]) -> None:
    """Here, or between two steps of the event loop that runs.

    In the middle of a step, an answer that was just read would be lost, and the cleaning could wait for it in vain.
    """
    asyncio = sys.modules.get("asyncio")
    loop = None if asyncio is None else asyncio._get_running_loop()
    if loop is None:
        act()
    else:
        loop.call_soon_threadsafe(act)


def _interrupt() -> None:
    """Interrupt as Ctrl-C does where asyncio.run has no handler: SIGINT is ignored in the background of a script."""
    raise KeyboardInterrupt
