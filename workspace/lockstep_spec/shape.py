"""The sizes of a model that its need of memory follows from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

NF4_BLOCK = 64
"""Weights that share one scale in NF4 (QLoRA, arXiv 2305.14314, section 3)."""
FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn"})
"""Linear layers that project to queries, keys and values at once."""
GATES = frozenset({"gate_proj", "gate_up_proj"})
"""Linear layers, or stacks of experts, whose output an activation function turns into a factor."""
PLAIN = frozenset({"fc1", "c_fc", "dense_h_to_4h", "up_proj"})
"""First layers of a feed-forward part without a gate."""
WEIGHED_IN_FP32 = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral"})
"""model_type of mixtures of experts whose routers give weights in FP32, with which transformers multiplies what experts give back."""
HEAD_NORMS = ("q_norm", "k_norm")
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Weight:
    """One parameter. `linear`: the weight of a linear layer, which can get an adapter and can be quantized. `tower`: of a part that text
    never passes, such as one that sees; it is never trained.
    """

    name: str
    shape: tuple[int, ...]
    linear: bool = False
    tower: bool = False

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
    key: int
    """Elements of its keys."""
    value: int
    """Elements that are kept with its values: where these are a view of what a fused layer projected, all of that."""
    attended: int
    """Elements of attention's output."""
    heads: int
    """Heads of queries."""
    intermediate: int
    """Width of the feed-forward part that a token passes; in a mixture of experts the sum over the experts that it is sent to."""
    experts_per_token: int
    """0 for a dense model."""
    vocabulary: int
    routed: int = 0
    """Part of `intermediate` that lies in stacks of experts, which no linear layer computes."""
    weighs_in_fp32: bool = False
    """True if what experts give back becomes FP32 as it is weighed."""
    caps_logits: bool = False
    """The model does more to its logits after its last layer, so that the loss needs them whole."""
    score_heads: int = 0
    """Heads of an attention that holds its scores whole; 0: the scores are never whole."""
    tied: tuple[Weight, ...] = ()
    """Further names of tensors among `weights`, such as a head that is the embedding. An adapter or a trained copy of one is no longer
    shared.
    """
    latent: int = 0
    """Elements of a token's compressed queries, keys and values, each with a norm of its own (multi-head latent attention); 0: none are."""
    by_steps: bool = False
    """Attention has no kernel of its own: it computes step by step in FP32, with scores that are whole."""
    masked: bool = False
    """The model builds a mask for every batch, of which each layer keeps one in numbers."""
    joined: bool = False
    """Queries and keys are joined from a part that is rotated and one that isn't, after which attention's output is copied for the layer
    behind it.
    """
    parallel: bool = False
    """Attention and feed-forward part have the same input, which their norms keep once."""
    factors: int = 3
    """Tensors as wide as the feed-forward part that are kept of it: of SiLU and a gate the gate, what is left of it, and the other factor.
    """
    product: bool = True
    """The last layer of the feed-forward part reads a further such tensor."""
    unmeasured: str = ""
    """model_type of an architecture whose activations nobody has measured: they are counted as those of others are."""

    @property
    def head_norms(self) -> bool:
        """True if queries and keys have norms of their own."""
        return any(_last(weight.module) in HEAD_NORMS for weight in self.weights)

    @property
    def casts_norms(self) -> bool:
        """True if norms compute in FP32 and keep their input so, as RMSNorm does. torch's LayerNorm, which has a bias, does not."""
        biased = {weight.module for weight in self.weights if weight.name.endswith(".bias")}
        return not any(norm.module in biased for norm in self._norms)

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def largest_module(self) -> int:
        """Elements of the weights that the module of a layer with the most of them owns itself: Stage3 gathers module by module."""
        owned: dict[str, int] = {}
        for weight in self.weights:
            if layer_of(weight.name):
                owned[weight.module] = owned.get(weight.module, 0) + weight.numel
        return max(owned.values(), default=0)

    @property
    def layer_norms(self) -> int:
        """Norms over the hidden size in each layer: mostly two; four where a norm follows attention and feed-forward part as well."""
        return len(self._norms) or 2

    @property
    def _norms(self) -> list[Weight]:
        """Norms of the first layer, over the hidden size."""
        first = next((layer for weight in self.weights if not weight.tower and (layer := layer_of(weight.name))), "")
        return [
            weight
            for weight in self.weights
            if weight.shape == (self.hidden,)
            and layer_of(weight.name) == first
            and weight.name.endswith(".weight")
            and _last(weight.module) not in (*HEAD_NORMS, *LATENT_NORMS)
        ]

    @property
    def copied_module(self) -> int:
        """Elements of the largest module that owns several weights: they are gathered into one buffer, and copied out of it."""
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
        """Weights, tied ones too, whose module, or which themselves, are named by an adapter's targets."""
        every = (weight for weight in (*self.weights, *self.tied) if not weight.tower)
        return [weight for weight in every if matching_names(targets, (weight.module, weight.name))]


def matching_names(targets: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that one of the targets is, or the end of whose dotted parts it is (peft's rule for lists)."""
    return [name for name in names if any(name == target or name.endswith(f".{target}") for target in targets)]


def without_kernel(shape: ModelShape) -> ModelShape:
    """The same on a CPU, where torch's attention has a kernel only for values that are as wide as keys."""
    heads = shape.heads if shape.attended != shape.query else 0
    return replace(shape, by_steps=True, score_heads=heads) if heads and not shape.score_heads else shape


def layer_of(name: str) -> str:
    """The numbered module that a weight is in, such as model.layers.3; "" for one outside of all layers."""
    match = _LAYER.match(name)
    return match[1] if match is not None else ""


def shape_of(
    config: Any,
    weights: tuple[Weight, ...],
    *,
    tied: tuple[Weight, ...] = (),
    caps_logits: bool = False,
    eager: bool = False,
    activation: tuple[int, bool] = (1, False),
    rotated: bool = True,
    joined: bool = False,
    masked: bool = False,
    unmeasured: str = "",
) -> ModelShape:
    """`config`: a transformers configuration, whose names for one thing differ from family to family. `eager`: of its attention.
    `activation`: how many tensors its activation function keeps, and whether its output is one of them (by default SiLU's and GELU's).
    `rotated`: queries and keys are turned by their position. `joined`, `masked`: see ModelShape."""

    def number(*names: str, default: int = 0) -> int:
        return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), default)

    hidden = number("hidden_size")
    heads = number("num_attention_heads", default=1)
    experts = number("num_experts_per_tok", "num_experts_per_token")
    routed = experts * number("moe_intermediate_size", "intermediate_size")
    shared = number("n_shared_experts") * number("moe_intermediate_size") + number("shared_expert_intermediate_size")
    kept, is_output_kept = activation
    gated = _is_gated(weights)
    return ModelShape(
        weights=weights,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        **(_latent_attention(number, heads) if number("kv_lora_rank") else _attention(number, weights, heads, rotated)),
        intermediate=(
            routed + shared if experts else number("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", default=4 * hidden)
        ),
        experts_per_token=experts,
        vocabulary=number("vocab_size"),
        routed=routed,
        weighs_in_fp32=getattr(config, "model_type", "") in WEIGHED_IN_FP32,
        caps_logits=caps_logits,
        score_heads=heads if eager else 0,
        tied=tied,
        parallel=any(getattr(config, name, False) for name in ("parallel_attn", "use_parallel_residual")),
        factors=kept + (1 if is_output_kept else 2) if gated else kept,
        product=gated or not is_output_kept,
        joined=joined or bool(number("kv_lora_rank")),
        masked=masked,
        unmeasured=unmeasured,
    )


def _attention(number: Callable[..., int], weights: tuple[Weight, ...], heads: int, rotated: bool) -> dict[str, Any]:
    """Widths where all heads have one size. Of one fused projection the values stay a view, unless a key is shared by all queries
    (Falcon).
    """
    head = number("head_dim", default=number("hidden_size") // heads)
    query = heads * head
    fused = next((max(weight.shape) for weight in weights if _last(weight.module) in FUSED and len(weight.shape) == 2), 0)
    key = (fused - query) // 2 if fused else number("num_key_value_heads", default=heads) * head
    viewed = bool(fused) and rotated and not number("multi_query")
    return {"query": query, "key": key, "value": fused if viewed else key, "attended": query}


def _latent_attention(number: Callable[..., int], heads: int) -> dict[str, Any]:
    """Widths where queries, keys and values are made of latent vectors; the values stay a view of what keys and values are made in."""
    fixed, value = number("qk_nope_head_dim"), number("v_head_dim")
    query = heads * (fixed + number("qk_rope_head_dim"))
    latent = number("kv_lora_rank") + number("q_lora_rank")
    return {"query": query, "key": query, "value": heads * (fixed + value), "attended": heads * value, "latent": latent}


def _is_gated(weights: tuple[Weight, ...]) -> bool:
    names = {_last(weight.module) for weight in weights} | {_last(weight.name) for weight in weights}
    return bool(names & GATES) or not names & PLAIN


def _last(name: str) -> str:
    return name.rpartition(".")[2]
