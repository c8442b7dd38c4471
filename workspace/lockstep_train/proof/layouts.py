"""Names and shapes of an adapter's tensors as engines other than PEFT take them (pure).

PEFT names layers as transformers does, and holds the adapter of a stack of experts in two tensors. vLLM and llama.cpp go by the names of
the base model's files, where most families have a tensor for each expert: PEFT's layout is refused there, or dropped without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep_train.model.layouts import TensorLayout
from lockstep_train.model.updates import Experts, LowRank, Update

PREFIX, WEIGHT = "base_model.model.", ".weight"
VLLM_STACKED = frozenset({"gpt_oss", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl_moe"})
"""Families of which vLLM 0.32 takes experts in PEFT's layout (`is_3d_moe_weight`)."""
VLLM_RANK = 512
"""Largest rank that vLLM 0.32 can be started for."""


class EngineRefusal(Exception):
    """Reason why an engine can't take an adapter."""


@dataclass(frozen=True)
class Factor:
    """A tensor of the exported adapter, and how it is cut out of a trained parameter. Without a source it is zero: it changes nothing."""

    name: str
    shape: tuple[int, ...]
    source: str | None
    cut: Callable[[torch.Tensor], torch.Tensor] = lambda values: values


def refuse_settings(engine: str, config: Mapping[str, Any]) -> None:
    """Raise EngineRefusal for a setting of adapter_config.json that vLLM 0.32 or llama.cpp has no place for."""
    if config["use_dora"]:
        raise EngineRefusal("it does not support DoRA")
    if config["modules_to_save"]:
        raise EngineRefusal(f"it takes no layers that were trained whole ({', '.join(sorted(config['modules_to_save']))})")
    if engine == "vllm" and config["r"] > VLLM_RANK:
        raise EngineRefusal(f"its largest rank is {VLLM_RANK}, and this one is {config['r']}")


def refuse_half(updates: Mapping[str, Update]) -> None:
    """Raise EngineRefusal where one of a layer's two stacks of experts has no adapter, which vLLM 0.32 asserts in PEFT's layout."""
    stacks = {target for target, update in updates.items() if isinstance(update, Experts)}
    half = {f"{target.rpartition('.')[0]}.{name}" for target in stacks for name in ("gate_up_proj", "down_proj")} - stacks
    if half:
        raise EngineRefusal(f"it takes adapters of gate_up_proj and down_proj together, and {min(half)} has none")


def stored_factors(
    updates: Mapping[str, Update], shapes: Mapping[str, tuple[int, ...]], layouts: Mapping[str, TensorLayout]
) -> list[Factor]:
    """Return the adapter's tensors under the names of the base's files, an expert at a time; zeros where vLLM asks for an adapter beside
    that of another stack of the same experts.

    `updates` and `layouts`: by the model's names; `shapes`: of the trained parameters. Raises EngineRefusal.
    """
    factors = [factor for target, update in updates.items() for factor in _factors(target, update, shapes, layouts)]
    ranks = {target.rpartition(".")[0]: shapes[each.a][0] // each.experts for target, each in updates.items() if isinstance(each, Experts)}
    for target in layouts.keys() - updates.keys():
        rank = ranks.get(target.rpartition(".")[0])
        if rank is not None and len(layouts[target].shape) == 3:
            for module, _, _, rows in _parts(target, layouts[target]):
                factors.append(Factor(f"{module}.lora_A{WEIGHT}", (rank, layouts[target].shape[-1]), None))
                factors.append(Factor(f"{module}.lora_B{WEIGHT}", (rows, rank), None))
    return factors


def _factors(target: str, update: Update, shapes: Mapping[str, tuple[int, ...]], layouts: Mapping[str, TensorLayout]) -> Iterator[Factor]:
    embedding = isinstance(update, LowRank) and ".lora_embedding_" in update.a
    if not isinstance(update, LowRank | Experts) or (update.transposed and not embedding):
        raise EngineRefusal(f"{target} is no sum of a weight and a product of two factors in the base model's files")
    (width_a, width), (height, width_b) = shapes[update.a], shapes[update.b]
    experts = update.experts if isinstance(update, Experts) else 1
    rank = width_b // experts
    whole = (f"{PREFIX}{target.removesuffix(WEIGHT)}", 0, 0, height)  # of a tied tensor, which is in no file
    parts = _parts(target, layouts[target]) if target in layouts else [whole]
    if embedding:
        yield Factor(f"{parts[0][0]}.lora_embedding_A", (width_a, width), update.a)
        yield Factor(f"{parts[0][0]}.lora_embedding_B", (height, width_b), update.b)
        return
    for module, expert, first, rows in parts:
        cut_a, cut_b = _cuts(experts, expert, slice(first, first + rows))
        yield Factor(f"{module}.lora_A{WEIGHT}", (rank, width), update.a, cut_a)
        yield Factor(f"{module}.lora_B{WEIGHT}", (rows, rank), update.b, cut_b)


def _cuts(experts: int, expert: int, rows: slice) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Cut one expert's factors: A [experts · rank, in] has the expert slowest, B [out, rank · experts] fastest."""
    return (
        lambda values: values.view(experts, -1, values.shape[-1])[expert],
        lambda values: values.view(values.shape[0], -1, experts)[rows, :, expert],
    )


def _parts(target: str, layout: TensorLayout) -> list[tuple[str, int, int, int]]:
    """Return the tensors of the files that a weight [out, in] or a stack of them is made of: module, expert, first row and number of rows.
    Raises EngineRefusal unless each is rows of one expert.
    """
    (height, width), parts, done = layout.shape[-2:], [], 0
    for piece in layout.pieces:
        expert, element = divmod(done, height * width)
        if piece.start or piece.numel % width or element + piece.numel > height * width or not piece.name.endswith(WEIGHT):
            raise EngineRefusal(f"{target} is a part of {piece.name} in the base model's files, and no tensor for each expert")
        parts.append((f"{PREFIX}{piece.name.removesuffix(WEIGHT)}", expert, element // width, piece.numel // width))
        done += piece.numel
    return parts
