"""Short runs, of which only the result is wanted, wherever they run: preflight of a job, an all-reduce sweep, and a few measured steps."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import NamedTuple

from lockstep.api.errors import Failed
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.plan.cluster.calibration import Point, Sweep, is_done, point_in
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.plan.render.run import result_in, with_preflight
from lockstep.platforms.jobs.runs import measured
from lockstep.programs import Place
from lockstep_gang.contract.preflight import PreflightReport
from lockstep_gang.contract.report import State
from lockstep_spec.words import printable_line

LINES = 6
"""Last lines of node 0 that are quoted where there is no result."""
POINTS_MAX = 1000
_ENDED = re.compile(rf"\[lockstep\] ({State.COMPLETE.value}|{State.FAILED.value}): (.*)")
Hear = Callable[[str], bool]
"""Takes a line of node 0, and returns True once nothing more is awaited."""
Read = Callable[[Place, str], Awaitable[None]]
"""Takes node 0's place, and the run's folder there, while both are still there."""


class Short(Enum):
    """A kind of short run."""

    PREFLIGHT = "preflight"
    """No rank is started, and the job's own folder and records are left alone."""
    SWEEP = "sweep"
    """The job is the sweep itself, and needs no volume."""
    STEPS = "measurement"
    """The job runs in a folder that no job has, which is removed."""


class ShortEnd(NamedTuple):
    """The end of a short run: node 0's last lines, and what it ran over."""

    last: str
    transport: str
    nodes: int


class ShortRuns(ABC):
    """A place where short runs are made. They leave nothing there, however the command ends."""

    left: str
    """State that an interrupted one leaves: `the pods are removed`."""
    silent = False
    """True if its runs say nothing of what they wait for."""
    on_one_machine = False
    """True if all nodes share the processors and the memory of one machine."""

    @abstractmethod
    async def run(self, kind: Short, job: TrainingJob, hear: Hear, read: Read | None = None) -> ShortEnd:
        """Run the job until `hear` has what it waits for, or its agents end; then call `read`, and remove all of it.

        Raises ConfigError when the job can't run there, Failed when it doesn't end in time or an agent ends by a fault of its own.
        """

    @abstractmethod
    async def pairs(self, job: TrainingJob, way: Way) -> PairsMeasured:
        """Measure all pairs of the nodes that the job would have. Raises as `run` does."""


async def preflight(runs: ShortRuns, job: TrainingJob) -> PreflightReport:
    """Look at the nodes of a job, and start no rank. Raises as `ShortRuns.run` does, and Failed without a result."""
    report: PreflightReport | None = None

    def hear(line: str) -> bool:
        nonlocal report
        report = report or result_in(line)
        return report is not None

    last = (await runs.run(Short.PREFLIGHT, with_preflight(job), hear)).last
    if report is None:
        raise Failed(f"preflight ended without a result; the log of node 0 ends with: {last}")
    return report


async def sweep(runs: ShortRuns, job: TrainingJob, show: Callable[[Point], None]) -> Sweep:
    """Measure an all-reduce of growing sizes. `show` gets every point. Raises as `preflight` does."""
    points, is_over = list[Point](), False

    def hear(line: str) -> bool:
        nonlocal is_over
        if (point := point_in(line)) is not None and len(points) < POINTS_MAX:
            points.append(point)
            show(point)
        is_over = is_over or is_done(line)
        return is_over

    last, transport, nodes = await runs.run(Short.SWEEP, job, hear)
    if not is_over:
        raise Failed(f"the sweep ended before its last size; the log of node 0 ends with: {last}")
    return Sweep(tuple(points), transport, nodes)


async def measured_steps(runs: ShortRuns, job: TrainingJob, values: Sequence[str]) -> tuple[dict[str, Object], str]:
    """Run the job, and return these `values` of each step, and why it failed, or ''. Raises as `preflight` does."""
    steps: dict[str, Object] = {}
    problem: str | None = None

    def hear(line: str) -> bool:
        nonlocal problem
        if problem is None and (end := _ENDED.match(line)) is not None:
            problem = "" if end[1] == State.COMPLETE.value else printable_line(end[2])
        return problem is not None

    async def read(place: Place, folder: str) -> None:
        if problem == "":
            steps.update(await measured(place, job.metadata.name, root=folder, values=values))

    last = (await runs.run(Short.STEPS, job, hear, read)).last
    if problem is None:
        raise Failed(f"the run ended without saying how; the log of node 0 ends with: {last}")
    return steps, problem
