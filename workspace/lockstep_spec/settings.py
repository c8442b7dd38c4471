"""The settings of a run that its sizes follow from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from lockstep_spec.choices import (
    Batches,
    Choice,
    Content,
    HierarchicalPartition,
    Method,
    Offload,
    Precision,
    Quantization,
    Recompute,
    ZeroStage,
)
from lockstep_spec.training import LoraConfig, TrainingConfig


class ParameterPlace(Choice):
    """Place in which Stage3 keeps shards of the weights until they are gathered (offload_param of the raw settings)."""

    DEVICE = "none"
    CPU = "cpu"
    NVME = "nvme"


class Level(IntEnum):
    """Part of a decoder layer that the backward pass computes again, from the cheapest to the dearest; in nearly all models each leaves
    less in memory.
    """

    NONE = 0
    NORMS = 1
    """Norms, gates and whatever else is no product of wide matrices and no attention."""
    ATTENTION = 2
    """All but attention's output."""
    ALL = 3


@dataclass(frozen=True)
class Recomputed:
    """Choice of what the backward pass computes again: the first `layers` layers at `level`, the others one level lower."""

    level: Level
    layers: int | None = None
    """None: every layer."""

    def of(self, layer: int) -> Level:
        """Return the level of a layer, counted from 0."""
        return self.level if self.layers is None or layer < self.layers else Level(self.level - 1)

    def share(self, level: Level, layers: int) -> float:
        """Return the share of a model's layers that compute again at least what `level` says."""
        first = layers if self.layers is None else self.layers
        return 1.0 if level < self.level else first / layers if level is self.level else 0.0

    def words(self, layers: int) -> str:
        """Return the same for people."""
        levels = [self.of(layer) for layer in range(layers)]
        parts = [(LEVEL_WORDS[level], levels.count(level)) for level in reversed(Level) if level and level in levels]
        return (
            " and ".join(f"{what} in {'all' if count == layers else f'{count} of {layers}'} layers" for what, count in parts)
            or LEVEL_WORDS[0]
        )


LEVEL_WORDS = ("nothing", "norms and gates", "all but attention's output", "everything")


@dataclass(frozen=True)
class Settings:
    """Names as in the API."""

    max_length: int
    """Tokens of the longest sample or, with packing, of a pack."""
    micro_batch_size: int
    adapter: LoraConfig
    """Not read with method Full."""
    zero_stage: ZeroStage
    precision: Precision = Precision.BF16
    method: Method = Method.LORA
    quantization: Quantization = Quantization.NONE
    offload: Offload = Offload.NONE
    recompute: Recompute = Recompute.AUTO
    chosen: Recomputed | None = None
    """Choice by the memory plan where `recompute` is Auto (fit.py); None: there is none."""
    hierarchical_partition: HierarchicalPartition = HierarchicalPartition.AUTO
    content: Content = Content.FULL
    gradient_bytes: int = 4
    """Bytes of an element of a gradient that is summed over micro-batches: FP32's, unless the raw settings choose a format of two."""
    live_elements: int | None = None
    """Elements of weights that Stage3 may have gathered, as the raw settings state it; None: by the model's largest layer (memory.py)."""
    bucket_elements: int | None = None
    """Elements of the bucket of gradients, as the raw settings state it; None: by what is trained."""
    overlap: bool | None = None
    """True if gradients are reduced beside the backward pass, as the raw settings state it; None: with method Full."""
    parameters: ParameterPlace = ParameterPlace.DEVICE
    """Place in which Stage3 keeps the weights' shards."""
    joins: bool = False
    """Rows hold several documents, each of which attention computes by itself."""

    @property
    def recomputed(self) -> Recomputed:
        """Return what the backward pass computes again; all, where Auto hasn't chosen."""
        if self.recompute is Recompute.AUTO and self.chosen is not None:
            return self.chosen
        return Recomputed(Level.NONE if self.recompute is Recompute.NONE else Level.ALL)

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight, of one micro-batch's gradient, and of an activation."""
        return 4 if self.precision is Precision.FP32 else 2


def parameter_place(zero: Mapping[str, Any]) -> ParameterPlace:
    """offload_param.device of the raw settings, or the older cpu_offload_param. What DeepSpeed will refuse counts as nothing."""
    offload = zero.get("offload_param")
    device = offload.get("device") if isinstance(offload, Mapping) else "cpu" if zero.get("cpu_offload_param") is True else None
    return ParameterPlace(device) if device in [place.value for place in ParameterPlace] else ParameterPlace.DEVICE


def _number(stated: Any) -> int | None:
    """Return the number as DeepSpeed reads it, which takes 1e9, and digits in quotes, too."""
    if isinstance(stated, str):
        return int(stated) if stated.isdecimal() else None
    return int(stated) if isinstance(stated, int) or (isinstance(stated, float) and math.isfinite(stated)) else None


def size_settings(training: TrainingConfig) -> Settings:
    """Return what the sizes of a training follow from."""
    optimization = training.optimization
    sections = [(training.deepspeed or {}).get(name) for name in ("zero_optimization", "data_types")]
    zero, data_types = (section if isinstance(section, Mapping) else {} for section in sections)
    overlap = zero.get("overlap_comm")
    return Settings(
        max_length=training.data.max_length,
        micro_batch_size=optimization.micro_batch_size,
        adapter=training.lora,
        zero_stage=training.zero_stage,
        precision=training.precision,
        method=training.method,
        quantization=training.model.quantization,
        offload=optimization.offload,
        recompute=optimization.recompute,
        hierarchical_partition=training.hierarchical_partition,
        content=training.checkpoint.content,
        gradient_bytes=2 if data_types.get("grad_accum_dtype") in {"bf16", "fp16"} else 4,
        live_elements=_number(zero.get("stage3_max_live_parameters", zero.get("max_live_parameters"))),
        bucket_elements=_number(zero.get("reduce_bucket_size")),
        overlap=overlap if isinstance(overlap, bool) else None,
        parameters=parameter_place(zero),
        joins=training.data.packing or optimization.batches is Batches.TOKENS,
    )
