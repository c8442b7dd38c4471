"""The settings of a run that its sizes follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class ZeroStage(Enum):
    """How much is sharded: optimizer state; and gradients; and weights."""

    STAGE1 = "Stage1"
    STAGE2 = "Stage2"
    STAGE3 = "Stage3"

    @property
    def number(self) -> int:
        return int(self.value[-1])


class Precision(Enum):
    """The dtype of weights and activations; masters and moments are always FP32."""

    BF16 = "BF16"
    FP16 = "FP16"
    FP32 = "FP32"


class Method(Enum):
    """What is trained: an adapter, or every weight."""

    LORA = "LoRA"
    FULL = "Full"


class Quantization(Enum):
    """The number format of the frozen base weights."""

    NONE = "None"
    NF4 = "NF4"
    INT8 = "Int8"


class Offload(Enum):
    """Where the optimizer's state lives and its step is computed."""

    NONE = "None"
    CPU = "CPU"


class HierarchicalPartition(Enum):
    """Whether each node keeps a whole copy of the frozen weights under Stage3 (ZeRO++ hpZ)."""

    AUTO = "Auto"
    NODE = "Node"
    NONE = "None"


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
    )
