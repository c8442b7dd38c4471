"""A rank's own time a step, told to the agent every few seconds: who holds the others up can't be seen from anything else."""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep_train.report.agent import Agent

PACE_SECONDS = 2.0


class PaceTeller:
    """Sums up steps between two tellings."""

    def __init__(self, agent: Agent, clock: Callable[[], float] = time.monotonic) -> None:
        self._agent = agent
        self._clock = clock
        self._seconds = 0.0
        self._steps = 0
        self._told_at = clock()

    def step(self, step: int, own_seconds: float) -> None:
        """`own_seconds`: of data, forward and backward pass, without what was waited for other ranks."""
        self._seconds += own_seconds
        self._steps += 1
        if self._clock() - self._told_at < PACE_SECONDS:
            return
        mean = round(1e6 * self._seconds / self._steps)
        self._agent.send("pace", step=step, steps=self._steps, microseconds=mean)
        self._seconds, self._steps, self._told_at = 0.0, 0, self._clock()
