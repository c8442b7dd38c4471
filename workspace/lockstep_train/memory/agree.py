"""Agreement of all ranks on one memory plan before anything is loaded, by the model's sizes as transformers builds it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_spec.choices import Balance, HierarchicalPartition
from lockstep_spec.families import FAMILIES
from lockstep_spec.fit import (
    EVERYTHING,
    MemoryPlan,
    after_out_of_memory,
    asked_partition,
    choose_partition,
    choose_recomputed,
    most_samples,
    plan_memory,
)
from lockstep_spec.memory import Place
from lockstep_spec.settings import Recomputed, Settings, size_settings
from lockstep_spec.shape import ModelShape, shape_of, without_kernel
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.imports import uncollected
from lockstep_train.base.ranks import Ranks
from lockstep_train.memory.capacity import device_bytes, has_host_memory, is_crowded
from lockstep_train.model.quantize import check_blocks
from lockstep_train.report import Reporter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Agreed:
    """`partition` ranks share a second copy of the weights (1: none); `plan` of this rank is None where a size is not known."""

    partition: int
    most: tuple[int, ...]
    """Samples of maxLength tokens that each rank may compute at once."""
    nodes: tuple[int, ...]
    """Node of each rank."""
    plan: MemoryPlan | None = None
    recomputed: Recomputed = EVERYTHING
    """Parts of layers that the backward pass computes again, on every rank."""


@dataclass(frozen=True)
class RankFacts:
    """Facts of a rank on which its memory plan depends."""

    capacity: int | None
    """Bytes of its device; None: not known."""
    local_world_size: int
    node: int
    shared: bool = False
    """Its device's memory is the machine's."""
    crowded: bool = False
    """Another process holds memory of its GPU."""


def agree_on_memory(training: TrainingConfig, folder: Path, ranks: Ranks, reporter: Reporter, stated: Sequence[int] = ()) -> Agreed:
    """Print the plan, by the smallest device of all ranks. Raises ConfigError, on every rank, for what can't fit, be packed or be shared.

    `stated`: samples that the ranks of each node compute at once, 0 where nobody says. With any, or with balance Measured, each rank has a
    plan of its own, and the one with the least room is printed.
    """
    with uncollected():
        importlib.import_module("transformers.modeling_utils")
    reporter.startup.done("imports")
    facts = _facts(ranks)
    crowded = "another process holds memory of a GPU" if any(one.crowded for one in facts) else ""
    place = Place(ranks.world_size, ranks.local_world_size, gpu=ranks.device.type == "cuda", shared=all(one.shared for one in facts))
    if len({one.local_world_size for one in facts}) > 1:
        if training.hierarchical_partition is HierarchicalPartition.NODE:
            raise ConfigError(
                "training.hierarchicalPartition is Node, but the nodes have different numbers of ranks; give each the same, or set it to"
                " None"
            )
        training = replace(training, hierarchical_partition=HierarchicalPartition.NONE)
    settings = size_settings(training)
    shape = _shape(folder, ranks.device, reporter)
    if shape is not None:
        check_blocks(shape, settings.quantization, ranks.device)
    asked = [Asked(settings.micro_batch_size, stated[one.node] if stated else 0, training.optimization.balance) for one in facts]
    smallest = min((one.capacity for one in facts if one.capacity is not None), default=None)
    nodes = tuple(one.node for one in facts)
    alike = len(set(asked)) == 1 and asked[0].fixed
    if shape is None or smallest is None:
        settings, why = choose_recomputed(None, settings, place, [])
        reporter.say(
            "There is no memory plan: Lockstep can't check whether this run"
            f" fits{why and ', and the backward pass computes all layers again'}"
        )
        return Agreed(asked_partition(settings, place) or 1, tuple(one.most(None) for one in asked), nodes, None, settings.recomputed)
    place = replace(place, partition=choose_partition(shape, settings, place, smallest))
    rooms = [smallest if alike or one.capacity is None else one.capacity for one in facts]
    needs = [(one.fixed or one.micro, room) for one, room in zip(asked, rooms, strict=True)]
    settings, why = choose_recomputed(shape, settings, replace(place, shared=any(one.shared for one in facts)), needs, crowded)
    if why and settings.recomputed.level:
        reporter.say(f"optimization.recompute Auto: the backward pass computes again {settings.recomputed.words(shape.layers)}, {why}")
    sizes = RankSizes(shape, settings, place)
    plans = [sizes.plan(one, room) for one, room in zip(asked, rooms, strict=True)]
    _tell(max(plans, key=lambda plan: plan.total_bytes / plan.capacity_bytes), reporter)
    for node, plan in zip(nodes, plans, strict=True):
        refusal = plan.refusal()
        if refusal is not None:
            raise ConfigError(refusal if alike else f"node {node}: {refusal}")
    reporter.out_of_memory_advice = after_out_of_memory(plans[ranks.rank])
    most = tuple(one.most(plan if rank.capacity is not None else None) for one, plan, rank in zip(asked, plans, facts, strict=True))
    return Agreed(place.partition, most, nodes, plans[ranks.rank], settings.recomputed)


@dataclass(frozen=True)
class Asked:
    """Micro-batch that a rank is asked for: `micro` by the job, `stated` by its node, 0 where that says nothing."""

    micro: int
    stated: int
    balance: Balance

    @property
    def fixed(self) -> int:
        """Samples, or 0 where time and memory decide."""
        return self.stated or (0 if self.balance is Balance.MEASURED else self.micro)

    def most(self, plan: MemoryPlan | None) -> int:
        """Most samples at once by the rank's plan; without one it isn't known whether more would fit than the job states."""
        return self.fixed or (plan.settings.micro_batch_size if plan is not None else self.micro)


class RankSizes:
    """Memory plans of unlike ranks: those of equal ones are computed once."""

    def __init__(self, shape: ModelShape, settings: Settings, place: Place) -> None:
        self._shape = shape
        self._settings = settings
        self._place = place
        self._plans: dict[tuple[int, int], MemoryPlan] = {}

    def plan(self, asked: Asked, capacity: int) -> MemoryPlan:
        """Plan of a rank by the size that is fixed, or by the largest that its device has room for."""
        key = (asked.fixed, capacity)
        if key not in self._plans:
            samples = asked.fixed or most_samples(self._shape, self._settings, self._place, capacity)
            settings = replace(self._settings, micro_batch_size=samples)
            self._plans[key] = plan_memory(self._shape, settings, self._place, capacity)
        return self._plans[key]


def _facts(ranks: Ranks) -> list[RankFacts]:
    """Facts of every rank: the same list on all."""
    device, local = ranks.device, ranks.local_world_size
    mine = RankFacts(device_bytes(device, local), local, ranks.node, has_host_memory(device), is_crowded(device))
    facts = ranks.gather("memory/facts", astuple(mine))
    agreed = ranks.publish("memory/agreed", facts)
    ranks.gather("memory/read", True)  # what is refused next ends the first rank, and the store with it: not before all have read from it
    return [RankFacts(*one) for one in agreed]


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


MEASURED = {
    *FAMILIES, "deepseek_v2", "deepseek_v3", "falcon", "gemma", "gpt2", "gpt_neox", "opt", "phi", "qwen2_moe", "starcoder2",
}  # fmt: skip
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

    from lockstep_train.model.load import empty_model
    from lockstep_train.model.logits import ends_with_layer
    from lockstep_train.model.trained import model_weights

    model = empty_model(folder)
    own = {name for name, _ in model.named_parameters()}
    weights = list(model_weights(model))
    head = model.get_output_embeddings()
    caps_logits = type(head) is not torch.nn.Linear or not ends_with_layer(model, head)
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    shape = shape_of(
        text,
        tuple(weight for weight in weights if weight.name in own),
        tied=tuple(weight for weight in weights if weight.name not in own),
        caps_logits=caps_logits,
        eager=text._attn_implementation == "eager",
        activation=kept_by_activation(text),
        rotated=rope is not None,
        joined=isinstance(rope, dict) and rope.get("partial_rotary_factor") is not None,
        masked=text.model_type in MASKED,
        unmeasured="" if text.model_type in MEASURED else text.model_type,
    )
    return without_kernel(shape) if device is not None and device.type == "cpu" else shape


def kept_by_activation(config: Any) -> tuple[int, bool]:
    """Number of tensors that autograd keeps of the activation function, and whether its output is one of them. Of an unknown one: its
    input.
    """
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
