"""Layers that set a value: the job, the cluster, a default of the API, or the platform."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from lockstep.api.model import Model

T = TypeVar("T")


class Layer(StrEnum):
    """The layers, strongest first."""

    JOB = "job"
    CLUSTER = "cluster"
    DEFAULT = "default"  # of the API: what a field is when nobody sets it
    PLATFORM = "platform"  # where the job runs: a cluster, or processes on this machine


@dataclass(frozen=True)
class Layered(Generic[T]):
    """A value and the layer that set it."""

    value: T
    layer: Layer


@dataclass(frozen=True)
class Setting:
    """One row of `--explain`: a field, its value and the layer that set it."""

    field: str
    value: object
    layer: Layer


@dataclass(frozen=True)
class Notice:
    """Something a person must know. `reason` is one CamelCase word, fit to be a condition's reason."""

    reason: str
    message: str


def written(model: Model, field: str, layer: Layer) -> Layered[object]:
    """The value of `model.field` (snake_case): `layer` wrote it, or it is the API's default."""
    return Layered(getattr(model, field), layer if field in model.model_fields_set else Layer.DEFAULT)
