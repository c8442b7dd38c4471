"""Choice of a run's destinations of metrics. What can't work is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import netrc
import os
from collections.abc import Callable, Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep_spec.training import MetricsConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.runfile import RunConfig
from lockstep_train.report.sinks.sink import MetricsSink, ServiceRun, Tell, Writer, redact
from lockstep_train.report.sinks.writers import MLflowWriter, TensorBoardWriter, WandBWriter

MLFLOW_SCHEMES = ("http", "https", "file", "databricks")


def refuse_unusable_metrics(metrics: MetricsConfig, environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a destination whose package, address or key is missing."""
    variables = os.environ if environ is None else environ
    if metrics.tensor_board:
        _need("tensorboard", "metrics.tensorBoard", "tensorboard", "set metrics.tensorBoard to false")
    if metrics.mlflow is not None:
        _need("mlflow", "metrics.mlflow", "mlflow-skinny", "leave metrics.mlflow out")
        if urlsplit(metrics.mlflow.tracking_uri).scheme not in MLFLOW_SCHEMES:
            raise ConfigError(
                f"metrics.mlflow.trackingUri is {redact(metrics.mlflow.tracking_uri)!r}, but must begin with one of "
                f"{', '.join(f'{scheme}:' for scheme in MLFLOW_SCHEMES)}; give the address of an MLflow server, which has the database"
            )
    if metrics.wandb is not None:
        _need("wandb", "metrics.wandb", "wandb", "leave metrics.wandb out")
        if not _has_wandb_key(variables):
            raise ConfigError(
                "metrics.wandb is set, but there is no key: set WANDB_API_KEY in spec.env from a Secret, or WANDB_MODE to offline"
            )


def _need(module: str, field: str, package: str, otherwise: str) -> None:
    spec = find_spec(module)
    if spec is None or spec.origin is None:  # a folder of that name, as these tools leave behind, counts as a package of no origin
        raise ConfigError(f"{field} is set, but the package {package} is not installed; install it in the image, or {otherwise}")


def _has_wandb_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE") in {"offline", "disabled"}:
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def open_sinks(config: RunConfig, resumed_step: int, tell: Tell) -> list[MetricsSink]:
    """Destinations of `metrics`. Nothing is imported or sent yet."""
    metrics, job, logs = config.training.metrics, config.job_name, config.run_dir / "logs"
    parameters = run_parameters(config)
    writers: list[tuple[str, Callable[[], Writer]]] = []

    def identity(service: str) -> ServiceRun:
        return ServiceRun(logs / f"{service}-run.json", config.job_uid, resumed_step)

    if metrics.tensor_board:
        writers.append(("TensorBoard", lambda: TensorBoardWriter(logs / "tensorboard", resumed_step)))
    if (mlflow := metrics.mlflow) is not None:
        writers.append(("MLflow", lambda: MLflowWriter(mlflow, job, identity("mlflow"), parameters)))
    if (wandb := metrics.wandb) is not None:
        writers.append(("W&B", lambda: WandBWriter(wandb, job, logs, identity("wandb"), parameters)))
    return [MetricsSink(name, connect, tell) for name, connect in writers]


def run_parameters(config: RunConfig) -> dict[str, Any]:
    """Settings of the run as tables show them; without where metrics go, which may name a server's user."""
    training = {name: _plain(value) for name, value in vars(config.training).items() if name != "metrics"}
    return {**training, "job": config.job_name}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
