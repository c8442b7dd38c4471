"""Looks at a job or at machines, again and again: what `lockstep top` shows."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, NamedTuple

from lockstep.plan.pages.top import top_page

if TYPE_CHECKING:
    from lockstep.api.objects import Object
    from lockstep.plan.pages.table import Unheard

CURVE_POINTS = 60
CURVE_SECONDS = 10.0
"""The loss curve is read so often; the rest with every look."""


class Look(NamedTuple):
    """Values of a look, its lines, and whether it is the last one."""

    page: Object
    lines: list[str]
    over: bool = False


Looks = AsyncGenerator[Look, None]


class Curve:
    """Loss curve of a job, which is read less often than the rest."""

    def __init__(self) -> None:
        self.steps: Object = {}
        self._read, self._asked = -CURVE_SECONDS, 0.0
        self._is_due = False

    def points(self) -> int:
        """Return how many of its points are to be read now."""
        self._asked = time.monotonic()
        self._is_due = self._asked - self._read >= CURVE_SECONDS
        return CURVE_POINTS if self._is_due else 0

    def take(self, answer: Object) -> None:
        """Keep what node 0 has read of it, if it was due."""
        if self._is_due and answer.get("curve"):
            self.steps, self._read = answer["curve"], self._asked


def width() -> int | None:
    """Columns of the terminal; None if the output isn't one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def with_age(look: Object, unheard: Unheard | None) -> Object:
    return look if unheard is None else {**look, "stale": {"since": unheard.since, "message": unheard.text(time.time())}}


def page_lines(look: Object) -> list[str]:
    lines = list(top_page(look, time.time(), width()))
    return [*lines[:1], *([f"  {look['stale']['message']}"] if "stale" in look else []), *lines[1:]]
