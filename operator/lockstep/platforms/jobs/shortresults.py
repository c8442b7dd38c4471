"""Results of short runs, as node 0 prints them line by line: each `hear` returns True once nothing more is awaited."""

from __future__ import annotations

import re
from collections.abc import Callable

from lockstep.api.errors import Failed
from lockstep.plan.cluster.calibration import Point, Sweep, is_done, point_in
from lockstep.plan.render.run import result_in
from lockstep_gang.contract.preflight import PreflightReport
from lockstep_gang.contract.report import State
from lockstep_spec.words import printable_line

LINES = 6
"""Last lines of node 0 that are quoted where there is no result."""
POINTS_MAX = 1000
_ENDED = re.compile(rf"\[lockstep\] ({State.COMPLETE.value}|{State.FAILED.value}): (.*)")


class PreflightResult:
    """The report of a preflight."""

    report: PreflightReport | None = None

    def hear(self, line: str) -> bool:
        self.report = self.report or result_in(line)
        return self.report is not None

    def after(self, last: str) -> PreflightReport:
        """Return the report. Raises Failed with node 0's `last` lines."""
        if self.report is None:
            raise Failed(f"preflight ended without a result; the log of node 0 ends with: {last}")
        return self.report


class SweepResult:
    """The points of an all-reduce sweep, which `show` gets as they come."""

    def __init__(self, show: Callable[[Point], None]) -> None:
        self._show, self._points, self._ended = show, list[Point](), False

    def hear(self, line: str) -> bool:
        if (point := point_in(line)) is not None and len(self._points) < POINTS_MAX:
            self._points.append(point)
            self._show(point)
        self._ended = self._ended or is_done(line)
        return self._ended

    def after(self, last: str, transport: str, nodes: int) -> Sweep:
        """Return the sweep. Raises Failed with node 0's `last` lines."""
        if not self._ended:
            raise Failed(f"the sweep ended before its last size; the log of node 0 ends with: {last}")
        return Sweep(tuple(self._points), transport, nodes)


class RunEnd:
    """The end of a job of a few measured steps."""

    problem: str | None = None
    """The reason of its failure; '': it is complete."""

    def hear(self, line: str) -> bool:
        if self.problem is None and (end := _ENDED.match(line)) is not None:
            self.problem = "" if end[1] == State.COMPLETE.value else printable_line(end[2])
        return self.problem is not None

    def after(self, last: str) -> str:
        """Return why it failed. Raises Failed with node 0's `last` lines."""
        if self.problem is None:
            raise Failed(f"the run ended without saying how; the log of node 0 ends with: {last}")
        return self.problem
