"""A rank whose own work takes longer than that of the others."""

from __future__ import annotations

import os
import statistics
import time

from cases_stop import RANK, before_micro_batch

from lockstep_train import __main__ as trainer
from lockstep_train import steps
from lockstep_train.report import pace


def straggle(rank: int, times: float) -> int:
    """Every rank tells its pace with every step; `rank` sleeps in each so that it takes so many times as long, however busy the machine is."""
    work = [0.1]
    slept = [0.0]

    class Remembering(pace.PaceTeller):
        def step(self, step: int, own_seconds: float) -> None:
            work.append(own_seconds - slept[-1])
            super().step(step, own_seconds)

    def sleep(at: int) -> None:
        if os.environ[RANK] == str(rank):
            slept.append((times - 1) * statistics.median(work))
            time.sleep(slept[-1])

    pace.PACE_SECONDS = 0.0
    steps.PaceTeller = Remembering  # type: ignore[misc]
    before_micro_batch(sleep)
    return trainer.main([])
