"""What `--explain` shows: every value a job runs with, and the layer that set it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import TrainingJob
from lockstep.api.model import Model
from lockstep.plan.layers import Layer, Layered, Setting, written
from lockstep.plan.render.fabric import Variables

_PROFILE_SECTIONS = ("platform", "nodes", "storage", "security", "resources", "shm_size", "pod")
_JOB_SECTIONS = (
    "type", "interactive", "restart", "start_timeout_seconds", "hang_timeouts", "preflight", "suspend", "active_deadline_seconds", "ttl_seconds_after_finished", "queue_name", "training", "script", "env", "env_from", "image_pull_secrets", "pod_template",
)  # fmt: skip


def explain_settings(
    job: TrainingJob, profile: TrainingCluster, decided: Mapping[str, Layered[Any]], nccl: Variables
) -> tuple[Setting, ...]:
    """Rows in reading order: what two layers could have set, NCCL's variables, the rest of the job, the rest of the cluster."""
    rows = [Setting(field, _plain(layered.value), layered.layer) for field, layered in decided.items()]
    rows += [Setting(f"env.{name}", layered.value, layered.layer) for name, layered in nccl.items()]
    rows += _sections(job.spec, _JOB_SECTIONS, Layer.JOB, "")
    rows += _sections(profile.spec, _PROFILE_SECTIONS, Layer.CLUSTER, "cluster.")
    return tuple(rows)


def _sections(model: Model, sections: tuple[str, ...], layer: Layer, prefix: str) -> Iterator[Setting]:
    for field in sections:
        yield from _rows(model, field, layer, prefix)


def _rows(model: Model, field: str, layer: Layer, prefix: str) -> Iterator[Setting]:
    """One row for a plain value, one for each field of a model; nothing for what is unset or empty."""
    layered = written(model, field, layer)
    value = layered.value
    path = prefix + (type(model).model_fields[field].alias or field)
    if isinstance(value, Model):
        for inner in type(value).model_fields:
            yield from _rows(value, inner, layer, f"{path}.")
    elif value not in (None, [], {}):
        yield Setting(path, _plain(value), layered.layer)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Model):
        return value.to_dict()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
