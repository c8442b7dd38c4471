"""What this node's ranks print, for whoever has asked for their run: in order, in small bundles, and never so much that anybody waits."""

from __future__ import annotations

from collections.abc import Callable

from lockstep_gang.agent.link.link import Link
from lockstep_gang.contract.interactive import Printed

BUNDLE_CHARACTERS = 128 * 1024
WAITING_CHARACTERS = 2 * 1024 * 1024
FLUSH_SECONDS = 0.1


class PrintedLines:
    """Takes lines at any speed. What the connection doesn't take is left out there, and counted; this node's own log has it."""

    def __init__(self, link: Link, node: int) -> None:
        self._link, self._node = link, node
        self._attempt = 0
        self._lines: list[str] = []
        self._characters = 0
        self._left_out = 0

    def begin(self, attempt: int) -> None:
        self._attempt, self._lines, self._characters, self._left_out = attempt, [], 0, 0

    def beside(self, write: Callable[[str], None]) -> Callable[[str], None]:
        """Lines go to `write`, and are kept for the next `flush`."""

        def both(line: str) -> None:
            write(line)
            self.add(line)

        return both

    def add(self, line: str) -> None:
        if self._characters > WAITING_CHARACTERS:
            self._left_out += 1
            return
        self._lines.append(line)
        self._characters += len(line) + 1
        if self._characters > BUNDLE_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        if not self._lines or not self._link.has_room:
            return
        if self._left_out:
            self._lines.append(f"[lockstep] {self._left_out} lines of node {self._node} left out: they came too fast; its own log has them")
            self._left_out = 0
        while self._lines:
            self._link.send(Printed(self._attempt, self._bundle()))

    def _bundle(self) -> tuple[str, ...]:
        """The first lines, as many as one message takes, and one at least."""
        size, count = 0, 0
        while count < len(self._lines) and (size == 0 or size + len(self._lines[count]) < BUNDLE_CHARACTERS):
            size += len(self._lines[count]) + 1
            count += 1
        bundle, self._lines = tuple(self._lines[:count]), self._lines[count:]
        self._characters -= size
        return bundle
