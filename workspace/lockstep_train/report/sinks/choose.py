"""Choice of a run's destinations of metrics. What can't work is refused before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import netrc
import os
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from lockstep_spec.choices import Tracker
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.runfile import RunConfig
from lockstep_train.report.sinks.sink import MetricsSink, ServiceRun, Tell, Writer, redact
from lockstep_train.report.sinks.writers import MLflowWriter, TensorBoardWriter, WandBWriter

PACKAGES = {
    Tracker.TENSORBOARD: ("tensorboard", "tensorboard"),
    Tracker.MLFLOW: ("mlflow", "mlflow-skinny"),
    Tracker.WANDB: ("wandb", "wandb"),
}
"""Module and package of each tracker."""
MLFLOW_SCHEMES = ("http", "https", "file", "databricks")


def refuse_unusable_trackers(trackers: Collection[Tracker], environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a destination whose package, address or key is missing."""
    variables = os.environ if environ is None else environ
    for tracker in trackers:
        _need(tracker, *PACKAGES[tracker])
    uri = variables.get("MLFLOW_TRACKING_URI", "")
    if Tracker.MLFLOW in trackers and urlsplit(uri).scheme not in MLFLOW_SCHEMES:
        raise ConfigError(
            f"training.reportTo has MLflow, but MLFLOW_TRACKING_URI is {redact(uri)!r}: set it in spec.env to the address of an MLflow"
            f" server, which has the database; it begins with one of {', '.join(f'{scheme}:' for scheme in MLFLOW_SCHEMES)}"
        )
    if Tracker.WANDB in trackers and not _has_wandb_key(variables):
        raise ConfigError(
            "training.reportTo has WandB, but there is no key: set WANDB_API_KEY in spec.env from a Secret, or WANDB_MODE to offline"
        )


def _need(tracker: str, module: str, package: str) -> None:
    spec = find_spec(module)
    if spec is None or spec.origin is None:  # a folder of that name, as these tools leave behind, counts as a package of no origin
        raise ConfigError(
            f"training.reportTo has {tracker}, but the package {package} is not installed; install it in the image, or leave {tracker} out"
        )


def _has_wandb_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_MODE") in {"offline", "disabled"}:
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def open_sinks(config: RunConfig, resumed_step: int, tell: Tell) -> list[MetricsSink]:
    """Return the destinations of `report_to`. Nothing is imported or sent yet."""
    job, logs = config.job_name, config.run_dir / "logs"
    parameters = {**json.loads(json.dumps(dataclasses.asdict(config.training))), "job": job}

    def identity(service: str) -> ServiceRun:
        return ServiceRun(logs / f"{service}-run.json", config.job_uid, resumed_step)

    writers: dict[Tracker, Callable[[], Writer]] = {
        Tracker.TENSORBOARD: lambda: TensorBoardWriter(logs / "tensorboard", resumed_step),
        Tracker.MLFLOW: lambda: MLflowWriter(job, identity("mlflow"), parameters),
        Tracker.WANDB: lambda: WandBWriter(job, logs, identity("wandb"), parameters),
    }
    return [MetricsSink(tracker.value, connect, tell) for tracker, connect in writers.items() if tracker in config.training.report_to]
