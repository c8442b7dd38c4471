"""Writers of metrics, each by a library that is imported when its sink begins to work: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep_train.report.sinks.sink import Point, ServiceRun


class TensorBoardWriter:
    """Writer by torch of event files, which `tensorboard --logdir runs/x/logs/tensorboard` shows, a process of its own. After a resume,
    TensorBoard hides what an earlier attempt wrote of the steps that are done again.
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, points: list[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.time)
        self._writer.flush()  # a kill loses no more than what is on its way

    def close(self, outcome: str) -> None:
        self._writer.close()


PROJECT = "lockstep"
"""The project or experiment that a run is filed under, unless the tracker's own variable names another."""
METRICS_A_REQUEST = 1000
PARAMETERS_A_REQUEST = 100
PARAMETER_CHARACTERS = 500
STATUS = {"Done": "FINISHED", "Stopped": "KILLED", "Failed": "FAILED"}
SETTINGS = {
    "MLFLOW_EXPERIMENT_NAME": PROJECT,
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # of 120 s: the sink tries again by itself
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # whoever writes file: wants it
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a run on a private cluster tells nobody else of itself
}


class MLflowWriter:
    """Writer by the client without its globals: no active run, no autologging. All attempts of a job are one MLflow run. The client reads
    MLFLOW_TRACKING_URI itself.
    """

    def __init__(self, job: str, identity: ServiceRun, parameters: Mapping[str, Any]) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient()
        earlier = identity.recall()
        self._run = earlier or self._create(os.environ["MLFLOW_EXPERIMENT_NAME"], job, parameters)
        if earlier is None:
            identity.keep(self._run)
        else:
            self._client.update_run(self._run, status="RUNNING")
        self._last_steps: dict[str, int] = {}
        self._resumed = earlier is not None

    def _create(self, experiment: str, job: str, parameters: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        existing = self._client.get_experiment_by_name(experiment)
        folder = existing.experiment_id if existing is not None else self._client.create_experiment(experiment)
        run = str(self._client.create_run(folder, run_name=job).info.run_id)
        listed = [Param(name, str(value)[:PARAMETER_CHARACTERS]) for name, value in flat(parameters)]
        for start in range(0, len(listed), PARAMETERS_A_REQUEST):
            self._client.log_batch(run, params=listed[start : start + PARAMETERS_A_REQUEST])
        return run

    def write(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        listed = [
            Metric(name, value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
            if point.step > self._last_step(name)
        ]
        for start in range(0, len(listed), METRICS_A_REQUEST):
            self._client.log_batch(self._run, metrics=listed[start : start + METRICS_A_REQUEST])

    def _last_step(self, name: str) -> int:
        """Last step that earlier attempts sent: MLflow can't take back the steps that are done again, and shows a step twice."""
        if not self._resumed:
            return -1
        if name not in self._last_steps:
            self._last_steps[name] = max((metric.step for metric in self._client.get_metric_history(self._run, name)), default=-1)
        return self._last_steps[name]

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self._run, STATUS[outcome])


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """`{"lora": {"rank": 8}}` as `("lora.rank", 8)`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


INIT_SECONDS = 30


class WandBWriter:
    """Writer by wandb, one run for all attempts of a job. wandb's own process does the sending; it gets no console, no code and no
    environment to send. wandb reads WANDB_PROJECT, WANDB_ENTITY and its other variables itself.
    """

    def __init__(self, job: str, folder: Path, identity: ServiceRun, parameters: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_PROJECT", PROJECT)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        earlier = identity.recall()
        run_id = earlier or uuid.uuid4().hex[:12]
        self._run = wandb.init(
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
