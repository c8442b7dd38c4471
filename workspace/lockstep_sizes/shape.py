"""The sizes of a model that its need of memory follows from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NF4_BLOCK = 64
"""Weights that share one scale in NF4 (QLoRA, arXiv 2305.14314, section 3)."""


@dataclass(frozen=True)
class Weight:
    """One parameter. `linear`: the weight of a linear layer, which can get an adapter and can be quantised."""

    name: str
    shape: tuple[int, ...]
    linear: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class ModelShape:
    weights: tuple[Weight, ...]
    layers: int
    hidden: int
    query: int
    """Elements of a token's queries: heads × head size."""
    key_value: int
    """Elements of its keys, and of its values."""
    intermediate: int
    """Of the feed-forward part that a token passes; in a mixture of experts over the experts that it is sent to."""
    experts_per_token: int
    """0 for a dense model."""
    vocabulary: int
    routed: int = 0
    """Of `intermediate`: what lies in stacks of experts, which no linear layer computes."""
    caps_logits: bool = False
    """The model does more to its logits after its last layer, so that the loss needs them whole."""
    score_heads: int = 0
    """Heads of an attention that holds its scores whole; 0: the scores are never whole."""
    tied: tuple[Weight, ...] = ()
    """Further names of tensors among `weights`, such as a head that is the embedding. An adapter or a trained copy of one is no longer shared."""

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys have norms of their own."""
        return any(weight.name.endswith(".q_norm.weight") for weight in self.weights)

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def largest_module(self) -> int:
        """Elements of the weights that the module of a layer with the most of them owns itself: Stage3 gathers module by module."""
        owned: dict[str, int] = {}
        for weight in self.weights:
            if ".layers." in weight.name:
                owned[weight.module] = owned.get(weight.module, 0) + weight.numel
        return max(owned.values(), default=0)

    @property
    def layer_norms(self) -> int:
        """Norms over the hidden size in each layer: two, or four where a norm follows attention and feed-forward part as well."""
        first = [weight.name for weight in self.weights if ".layers.0." in weight.name and weight.shape == (self.hidden,)]
        return max(2, sum(name.endswith("layernorm.weight") for name in first))

    @property
    def copied_module(self) -> int:
        """Of the largest module that owns several weights: they are gathered into one buffer, and copied out of it."""
        owned: dict[str, list[int]] = {}
        for weight in self.weights:
            owned.setdefault(weight.module, []).append(weight.numel)
        return max((sum(sizes) for sizes in owned.values() if len(sizes) > 1), default=0)

    @property
    def packable(self) -> list[Weight]:
        """Weights that bitsandbytes packs: of linear layers, but the head."""
        return [weight for weight in self.weights if weight.linear and weight.module != "lm_head"]

    @property
    def ragged(self) -> list[Weight]:
        """Packable weights whose rows are no whole blocks of NF4."""
        return [weight for weight in self.packable if weight.shape[1] % NF4_BLOCK]

    def adapted(self, targets: Sequence[str]) -> list[Weight]:
        """Weights, tied ones too, whose module, or which themselves, are named by an adapter's targets (peft's rule for lists)."""
        return [
            weight
            for weight in (*self.weights, *self.tied)
            if any(name == target or name.endswith(f".{target}") for target in targets for name in (weight.module, weight.name))
        ]


def shape_of(
    config: Any, weights: tuple[Weight, ...], *, tied: tuple[Weight, ...] = (), caps_logits: bool = False, eager: bool = False
) -> ModelShape:
    """`config`: a transformers configuration, whose names for one thing differ from family to family. `eager`: of its attention."""

    def number(*names: str, default: int = 0) -> int:
        return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), default)

    hidden = number("hidden_size")
    heads = number("num_attention_heads", default=1)
    head = number("head_dim", default=hidden // heads)
    experts = number("num_experts_per_tok", "num_experts_per_token")
    routed = experts * number("moe_intermediate_size", "intermediate_size")
    shared = number("n_shared_experts") * number("moe_intermediate_size") + number("shared_expert_intermediate_size")
    return ModelShape(
        weights=weights,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        query=heads * head,
        key_value=number("num_key_value_heads", default=heads) * head,
        intermediate=routed + shared if experts else number("intermediate_size"),
        experts_per_token=experts,
        vocabulary=number("vocab_size"),
        routed=routed,
        caps_logits=caps_logits,
        score_heads=heads if eager else 0,
        tied=tied,
    )
