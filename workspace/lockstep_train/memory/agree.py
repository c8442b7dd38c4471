"""Agreement of all ranks on one memory plan before anything is loaded, by the model's sizes as transformers builds it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_spec.choices import HierarchicalPartition
from lockstep_spec.fit import MemoryPlan, after_out_of_memory, asked_partition, choose_partition, plan_memory
from lockstep_spec.memory import Place
from lockstep_spec.settings import size_settings
from lockstep_spec.shape import ModelShape, Weight, shape_of, without_kernel
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.ranks import Ranks
from lockstep_train.data.isolation import HALF, varlen_attention
from lockstep_train.memory.capacity import device_bytes
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


MEASURED = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt2", "gpt_neox", "llama", "mistral",
        "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2",
    }
)  # fmt: skip
"""model_type of the architectures whose layers keep what the plan counts (tests/train/engine/test_sizes.py)."""
MASKED = frozenset({"falcon"})
"""Architectures, of these, that never leave the mask to attention's kernel."""
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")
"""Names that configurations have for an activation function."""


def read_shape(folder: Path, device: torch.device | None = None) -> ModelShape:
    """Read a model's sizes from config.json alone: it is built without memory. `device`: where it will compute; None: on a GPU.

    Raises what transformers raises for a configuration it doesn't know.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lockstep_train.model.logits import ends_with_layer

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    own = {name for name, _ in model.named_parameters()}
    weights = [
        Weight(name, tuple(parameter.shape), name.endswith(".weight") and name.removesuffix(".weight") in linear)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    head = model.get_output_embeddings()
    caps_logits = type(head) is not torch.nn.Linear or not ends_with_layer(model, head)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    shape = shape_of(
        text,
        tuple(weight for weight in weights if weight.name in own),
        tied=tuple(weight for weight in weights if weight.name not in own),
        caps_logits=caps_logits,
        eager=model.config.get_text_config()._attn_implementation == "eager",
        activation=kept_by_activation(text),
        rotated=rope is not None,
        joined=isinstance(rope, dict) and rope.get("partial_rotary_factor") is not None,
        masked=text.model_type in MASKED,
        unmeasured="" if text.model_type in MEASURED else text.model_type,
    )
    return without_kernel(shape) if device is not None and device.type == "cpu" else shape


def kept_by_activation(config: Any) -> tuple[int, bool]:
    """Number of tensors that autograd keeps of the activation function, and whether its output is one of them. Of an unknown one: its input."""
    import torch
    from transformers.activations import ACT2FN

    name = next((value for key in ACTIVATIONS if isinstance(value := getattr(config, key, None), str)), None)
    if name not in ACT2FN:
        return 1, False
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = ACT2FN[name](torch.empty(1, device="meta", requires_grad=True))
    return len(saved), output.untyped_storage()._cdata in saved
