"""The settings of a run that its sizes follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep_sizes.choices import Content, HierarchicalPartition, Method, Offload, Precision, Quantization, ZeroStage


@dataclass(frozen=True)
class Adapter:
    """What of an adapter's settings decides how many elements it has. Not read with method Full."""

    rank: int
    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    dora: bool = False


@dataclass(frozen=True)
class Settings:
    """Names as in the API."""

    max_length: int
    """Tokens of the longest sample or, with packing, of a pack."""
    micro_batch_size: int
    adapter: Adapter
    zero_stage: ZeroStage
    precision: Precision = Precision.BF16
    method: Method = Method.LORA
    quantization: Quantization = Quantization.NONE
    offload: Offload = Offload.NONE
    gradient_checkpointing: bool = False
    hierarchical_partition: HierarchicalPartition = HierarchicalPartition.AUTO
    content: Content = Content.FULL

    @property
    def element_bytes(self) -> int:
        """Of a weight, a gradient and an activation."""
        return 4 if self.precision is Precision.FP32 else 2


def read_settings(training: Mapping[str, Any]) -> Settings:
    """Of run.json's `training`, in which every field stands."""
    lora, optimization = training["lora"], training["optimization"]
    return Settings(
        max_length=training["data"]["maxLength"],
        micro_batch_size=optimization["microBatchSize"],
        adapter=Adapter(
            lora["rank"], tuple(lora["targetModules"]), tuple(lora["targetParameters"]), tuple(lora["modulesToSave"]), lora["dora"]
        ),
        zero_stage=ZeroStage(training["zeroStage"]),
        precision=Precision(training["precision"]),
        method=Method(training["method"]),
        quantization=Quantization(training["model"]["quantization"]),
        offload=Offload(optimization["offload"]),
        gradient_checkpointing=optimization["gradientCheckpointing"],
        hierarchical_partition=HierarchicalPartition(training["hierarchicalPartition"]),
        content=Content(training["checkpoint"]["content"]),
    )
