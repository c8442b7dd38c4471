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
    gradient_bytes: int = 4
    """Of an element of a gradient that is summed over micro-batches: see `summed_bytes`."""
    live_elements: int | None = None
    """Of weights that Stage3 may have gathered, as the raw settings state it; None: by the model's largest layer (gathering.py)."""
    packing: bool = False
    flash_attention: bool = True
    """Packed documents are kept apart by flash attention, and not by a mask."""

    @property
    def element_bytes(self) -> int:
        """Of a weight, of one micro-batch's gradient, and of an activation."""
        return 4 if self.precision is Precision.FP32 else 2


def stated_live(deepspeed: Mapping[str, Any] | None) -> int | None:
    """stage3_max_live_parameters of the raw settings."""
    zero = (deepspeed or {}).get("zero_optimization")
    stated = zero.get("stage3_max_live_parameters", zero.get("max_live_parameters")) if isinstance(zero, Mapping) else None
    return int(stated) if isinstance(stated, int | float) else None


def summed_bytes(deepspeed: Mapping[str, Any] | None) -> int:
    """Of an element of a summed gradient: FP32, unless the raw settings choose the precision's own format of two bytes."""
    data_types = (deepspeed or {}).get("data_types")
    return 2 if isinstance(data_types, Mapping) and data_types.get("grad_accum_dtype") in {"bf16", "fp16"} else 4


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
        gradient_bytes=summed_bytes(training.get("deepspeed")),
        live_elements=stated_live(training.get("deepspeed")),
        packing=training["data"]["packing"],
    )
