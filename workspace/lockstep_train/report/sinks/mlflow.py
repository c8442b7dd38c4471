"""Metrics to an MLflow server: one MLflow run for all attempts of a job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep_spec.training import MLflowConfig
from lockstep_train.report.sinks.identity import ServiceRun
from lockstep_train.report.sinks.sink import Point

METRICS_A_REQUEST = 1000
PARAMETERS_A_REQUEST = 100
PARAMETER_CHARACTERS = 500
STATUS = {"Done": "FINISHED", "Stopped": "KILLED", "Failed": "FAILED"}
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # of 120 s: the sink tries again by itself
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # whoever writes file: wants it
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a run on a private cluster tells nobody else of itself
}


class MLflowWriter:
    """Writer by the client without its globals: no active run, no autologging."""

    def __init__(self, config: MLflowConfig, job: str, identity: ServiceRun, parameters: Mapping[str, Any]) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(config.tracking_uri, registry_uri=config.tracking_uri)
        earlier = identity.recall()
        self._run = earlier or self._create(config.experiment, job, parameters)
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
