"""SIGTERM and SIGHUP end a verb as Ctrl-C does, so that what it made in a cluster goes with it: a CI's timeout, a terminal that is closed."""

from __future__ import annotations

import functools
import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_like_ctrl_c() -> Iterator[list[int]]:
    """The signals that came meanwhile: none, or the one that ended the verb, after which no other changes how the process ends. One that this
    process was started to ignore (`nohup`) stays ignored."""
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        """Only the first counts: `timeout` signals a process and then its group, and the second must not cut the cleaning short."""
        if received:
            return
        received.append(number)
        if number == signal.SIGHUP:
            _leave_terminal()
        ctrl_c = signal.getsignal(signal.SIGINT)
        if isinstance(ctrl_c, functools.partial):  # of asyncio.run: it cancels the main task, which cleans up
            ctrl_c(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    changed = [number for number in NUMBERS if mine and signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield received
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_IGN if received else signal.SIG_DFL)


def _leave_terminal() -> None:
    """Every write to a terminal that is gone is an error, and would cut the cleaning short."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
