"""Agreement of all ranks on one memory plan before anything is loaded."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_spec.choices import HierarchicalPartition
from lockstep_spec.fit import MemoryPlan, after_out_of_memory, asked_partition, choose_partition, plan_memory
from lockstep_spec.memory import Place
from lockstep_spec.settings import size_settings
from lockstep_spec.shape import ModelShape
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.ranks import Ranks
from lockstep_train.data.tokens.attention import HALF, varlen_attention
from lockstep_train.memory.capacity import device_bytes
from lockstep_train.memory.shape import read_shape
from lockstep_train.model.quantize import check_blocks
from lockstep_train.report import Reporter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Agreed:
    """`partition` ranks share a second copy of the weights (1: none); `plan` is None where a size is not known."""

    partition: int
    plan: MemoryPlan | None = None


def agree_on_memory(training: TrainingConfig, folder: Path, ranks: Ranks, reporter: Reporter) -> Agreed:
    """Print the plan, by the smallest device of all ranks. Raises ConfigError, on every rank, for what can't fit, be packed or be shared."""
    importlib.import_module("transformers.modeling_utils")
    reporter.startup.done("imports")
    facts = _smallest(ranks)
    place = Place(ranks.world_size, ranks.local_world_size, gpu=ranks.device.type == "cuda")
    if not facts["equal"]:
        _refuse_unequal_nodes(training)
        training = replace(training, hierarchical_partition=HierarchicalPartition.NONE)
    flash = ranks.device.type == "cuda" and training.precision in HALF and varlen_attention() is not None
    settings = size_settings(training, flash_attention=flash)
    shape = _shape(folder, ranks.device, reporter)
    if shape is not None:
        check_blocks(shape, settings.quantization, ranks.device)
    capacity = facts["capacity"]
    if shape is None or capacity is None:
        reporter.say("There is no memory plan: Lockstep can't check whether this run fits")
        return Agreed(asked_partition(settings, place) or 1)
    place = replace(place, partition=choose_partition(shape, settings, place, capacity))
    plan = plan_memory(shape, settings, place, capacity)
    _tell(plan, reporter)
    refusal = plan.refusal()
    if refusal is not None:
        raise ConfigError(refusal)
    return Agreed(place.partition, plan)


def _smallest(ranks: Ranks) -> dict[str, Any]:
    """`capacity` of the smallest device, or None, and whether all nodes have `equal` numbers of ranks: the same on every rank."""
    facts = ranks.gather("memory/facts", [device_bytes(ranks.device, ranks.local_world_size), ranks.local_world_size])
    summary = None
    if facts is not None:
        capacities = [capacity for capacity, _ in facts if capacity is not None]
        summary = {"capacity": min(capacities, default=None), "equal": len({local for _, local in facts}) == 1}
    agreed = dict(ranks.publish("memory/agreed", summary))
    ranks.gather("memory/read", True)  # what is refused next ends the first rank, and the store with it: not before all have read from it
    return agreed


def _refuse_unequal_nodes(training: TrainingConfig) -> None:
    if training.hierarchical_partition is HierarchicalPartition.NODE:
        raise ConfigError(
            "training.hierarchicalPartition is Node, but the nodes have different numbers of ranks; give each the same, or set it to None"
        )


def _shape(folder: Path, device: torch.device, reporter: Reporter) -> ModelShape | None:
    try:
        return read_shape(folder, device)
    except Exception as error:  # whatever a model's own code raises; loading it will say what is wrong
        reporter.say(f"The sizes of {folder} can't be read from its config.json ({type(error).__name__}: {str(error).splitlines()[:1]})")
        return None


def _tell(plan: MemoryPlan, reporter: Reporter) -> None:
    for line in plan.lines():
        reporter.say(line)
    items = {item.name: item.size_bytes for item in plan.items}
    reporter.event("memoryPlan", totalBytes=plan.total_bytes, capacityBytes=plan.capacity_bytes, items=items)
    reporter.out_of_memory_advice = after_out_of_memory(plan)
