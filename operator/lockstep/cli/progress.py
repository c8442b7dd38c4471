"""What a verb that waits says meanwhile: one line that changes on a terminal, a line for every change elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from lockstep.cli.consoles import is_plain
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from rich.status import Status


class Progress:
    """`now` is what happens, `done` what has happened and stays."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._told = ""
        if sys.stdout.isatty() and not is_plain():
            from lockstep.cli.consoles import console

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
