"""Metrics to Weights & Biases: one run for all attempts of a job."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep_spec.training import WandBConfig
from lockstep_train.report.sinks.identity import ServiceRun
from lockstep_train.report.sinks.sink import Point

INIT_SECONDS = 30
FINISH_SECONDS = 20


class WandBWriter:
    """Writer by wandb, whose own process does the sending; it gets no console, no code and no environment to send."""

    def __init__(self, config: WandBConfig, job: str, folder: Path, identity: ServiceRun, parameters: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        earlier = identity.recall()
        run_id = earlier or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=job,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=dict(parameters),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
            ),
        )
        if earlier is None:
            identity.keep(run_id)

    def write(self, points: list[Point]) -> None:
        """Write points. Steps that the service has already are left out: it refuses to go back, with a warning each."""
        for point in points:
            if point.step >= self._run.step:
                self._run.log(dict(point.values), step=point.step)

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=1 if outcome == "Failed" else 0)
