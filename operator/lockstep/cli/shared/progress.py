"""What a verb that waits says meanwhile: one line that changes on a terminal, a line for every change elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from lockstep.cli.shared.consoles import is_plain
from lockstep.platforms.output import put, put_over, tell

if TYPE_CHECKING:
    from rich.status import Status


class Progress:
    """`now` is what happens, `done` what has happened and stays."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._told = ""
        if sys.stdout.isatty() and not is_plain():
            from lockstep.cli.shared.consoles import console

            self._status = console(highlight=False).status("")

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def now(self, text: str) -> None:
        """Transient on a terminal; elsewhere a line, unless it is what was said last."""
        if self._status is not None:
            from rich.text import Text

            from lockstep_gang.contract import printable_line

            self._status.update(Text(printable_line(text)))
        elif text != self._told:
            put(f"… {text}", flush=True)
        self._told = text

    def quietly(self, text: str) -> None:
        """Only on a terminal: steps too many and too short for a log."""
        if self._status is not None:
            self.now(text)

    def done(self, what: str, text: str) -> None:
        put(f"{what:<12} {text}", flush=True)


AT_FIRST_SECONDS, AT_A_TERMINAL_SECONDS, ELSEWHERE_SECONDS = 0.2, 1.0, 10.0


@contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """Until the block ends, or what it yields is called: say on standard error that `what` goes on, and for how long.

    At a terminal that is one line, there almost at once, which counts the seconds and goes in the end; elsewhere a line every ten seconds.
    """
    over, terminal, begun = threading.Event(), sys.stderr.isatty() and not is_plain(), time.monotonic()

    def show() -> None:
        width, seconds = 0, AT_FIRST_SECONDS if terminal else ELSEWHERE_SECONDS
        while not over.wait(seconds):
            seconds = AT_A_TERMINAL_SECONDS if terminal else ELSEWHERE_SECONDS
            line = f"… {what}, {time.monotonic() - begun:.0f} s"
            if not terminal:
                tell(line)
                continue
            put_over(line, width)
            width = len(line)
        if width:
            put_over("", width)

    thread = threading.Thread(target=show, name="waiting", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    try:
        yield stop
    finally:
        stop()
