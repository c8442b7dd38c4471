"""A model's parameters from its config.json alone, without torch: the families of decoders whose layers are known here.

The names and shapes are those of transformers' own modules, because targets of an adapter are found by these names;
tests/train/engine/test_sizes.py compares them. Another family is refused: its parameters would be a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lockstep_spec.shape import ModelShape, Weight, shape_of
from lockstep_spec.words import listed

DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "glm4", "olmo2", "gemma2", "gemma3_text")
EXPERTS = ("mixtral", "qwen3_moe", "glm4_moe")
FAMILIES = (*DENSE, *EXPERTS)
NORMED = ("qwen3", "qwen3_moe", "gemma3_text")
"""Each head's queries and keys have a norm; in glm4_moe where use_qk_norm says so. In olmo2 all heads have one together."""
GEMMA = ("gemma2", "gemma3_text")
"""Unless the file says otherwise, heads have 256 elements, and the head is the embedding. gemma2 holds attention's scores whole, and caps
its logits.
"""
FUSED = ("phi3", "glm4")
"""One layer computes both factors of the feed-forward part."""
NORMS = {
    "glm4": ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    **dict.fromkeys(GEMMA, ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")),
}
"""Norms of a layer over the hidden size, where they aren't those of Llama."""
JOINED = ("glm4_moe", "glm4", "phi3")
"""A part of each query and key is rotated, and then joined with the rest."""
FROM_ONE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size", "decoder_sparse_step",
)  # fmt: skip
FROM_ZERO = ("num_experts_per_tok", "n_shared_experts", "first_k_dense_replace")
MOVED = frozenset(
    {
        "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
        "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen3_moe",
        "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "solar_open",
    }
)  # fmt: skip
"""model_type of mixtures of experts where peft moves targets of these names, also dotted ones, onto the stacks of routed experts, and so
leaves the layers that have the names, dense and shared ones, without an adapter (_convert_peft_config_moe;
tests/train/models/test_families.py compares).
"""
MOVED_NAMES = ("gate", "gate_proj", "up_proj", "down_proj")
YES_OR_NO = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_qk_norm")


class UnknownModel(ValueError):
    """A config.json from which its parameters can't be derived here. The message says why."""


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Raises UnknownModel for a family that is not one of FAMILIES, or a file that lacks a size or has an impossible one."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnknownModel(f"model_type is {family!r}; known here are {', '.join(FAMILIES)}")
    stated = {name: value for name, value in config.items() if value is not None}
    _check(stated)
    try:
        weights = tuple(_weights(str(family), stated))
    except KeyError as error:
        raise UnknownModel(f"it has no {error.args[0]}") from None
    head = Weight("lm_head.weight", (stated["vocab_size"], stated["hidden_size"]), linear=True)
    is_tied = stated.get("tie_word_embeddings", family in GEMMA)
    checked = SimpleNamespace(**{name: stated[name] for name in ("model_type", *FROM_ONE, *FROM_ZERO) if name in stated})
    parts, tied, capped = (weights, (head,), family == "gemma2") if is_tied else ((*weights, head), (), family == "gemma2")
    return shape_of(checked, parts, tied=tied, joined=family in JOINED, caps_logits=capped, eager=capped)


def moved_targets(model_type: object, targets: Sequence[str]) -> str:
    """Return why an adapter of this model can't have these targets, and what works; "" if it can."""
    moved = [
        target for target in targets if isinstance(model_type, str) and model_type in MOVED and target.rpartition(".")[2] in MOVED_NAMES
    ]
    if not moved:
        return ""
    return (
        f"training.lora.targetModules: with a model of type {model_type}, peft puts the adapter of {listed(moved)} on all routed experts"
        " instead of the layers of this name; name layers of attention alone there, and routed experts in targetParameters"
        " (mlp.experts.gate_up_proj, mlp.experts.down_proj)"
    )


def _check(config: Mapping[str, Any]) -> None:
    """Raises UnknownModel for a value that no model of these families can have."""
    for names, least in ((FROM_ONE, 1), (FROM_ZERO, 0)):
        for name in names:
            if name in config and not _is_whole(config[name], least):
                raise UnknownModel(f"{name} is {config[name]!r}; it must be a whole number from {least}")
    for name in YES_OR_NO:
        if not isinstance(config.get(name, False), bool):
            raise UnknownModel(f"{name} is {config[name]!r}; it must be true or false")
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(_is_whole(layer, 0) for layer in dense):
        raise UnknownModel(f"mlp_only_layers is {dense!r}; it must be a list of layers' numbers")
    hidden, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 1)
    if "head_dim" not in config and hidden % heads:
        raise UnknownModel(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no head_dim")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _weights(family: str, config: Mapping[str, Any]) -> Iterator[Weight]:
    hidden = config["hidden_size"]
    yield Weight("model.embed_tokens.weight", (config["vocab_size"], hidden))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield from _attention(family, config, f"{layer}.self_attn")
        if family in EXPERTS and _has_experts(family, config, number):
            yield from _experts(family, config, f"{layer}.mlp")
        else:
            bias = bool(config.get("mlp_bias"))
            yield from _feed_forward(hidden, config["intermediate_size"], f"{layer}.mlp", bias=bias, fused=family in FUSED)
        for norm in NORMS.get(family, ("input_layernorm", "post_attention_layernorm")):
            yield Weight(f"{layer}.{norm}.weight", (hidden,))
    yield Weight("model.norm.weight", (hidden,))


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (outputs, inputs), linear=True)
    if bias:
        yield Weight(f"{name}.bias", (outputs,))


def _attention(family: str, config: Mapping[str, Any], name: str) -> Iterator[Weight]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim", 256 if family in GEMMA else hidden // heads)
    queries, keys = heads * head, config.get("num_key_value_heads", heads) * head
    stated = bool(config.get("attention_bias"))
    bias = family == "qwen2" or (stated and family != "phi3")
    separate = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    for projection, size in separate if family != "phi3" else (("qkv_proj", queries + 2 * keys),):
        yield from _linear(f"{name}.{projection}", size, hidden, bias=bias)
    yield from _linear(f"{name}.o_proj", hidden, queries, bias=stated and family not in ("qwen2", "glm4_moe", "glm4", "phi3"))
    if family in (*NORMED, "olmo2") or (family == "glm4_moe" and config.get("use_qk_norm")):
        yield Weight(f"{name}.q_norm.weight", (queries if family == "olmo2" else head,))
        yield Weight(f"{name}.k_norm.weight", (keys if family == "olmo2" else head,))


def _feed_forward(hidden: int, intermediate: int, name: str, *, bias: bool, fused: bool = False) -> Iterator[Weight]:
    for projection, size in (("gate_up_proj", 2 * intermediate),) if fused else (("gate_proj", intermediate), ("up_proj", intermediate)):
        yield from _linear(f"{name}.{projection}", size, hidden, bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, intermediate, bias=bias)


def _has_experts(family: str, config: Mapping[str, Any], layer: int) -> bool:
    if family == "glm4_moe":
        return layer >= int(config["first_k_dense_replace"])
    if family == "qwen3_moe":
        return layer not in config.get("mlp_only_layers", []) and (layer + 1) % int(config.get("decoder_sparse_step", 1)) == 0
    return True


def _experts(family: str, config: Mapping[str, Any], name: str) -> Iterator[Weight]:
    hidden = config["hidden_size"]
    names = {"mixtral": ("num_local_experts",), "qwen3_moe": ("num_experts", "num_local_experts"), "glm4_moe": ("n_routed_experts",)}[
        family
    ]
    count = config[next((stated for stated in names if stated in config), names[0])]  # (the second as transformers 5 saves it)
    intermediate = config["intermediate_size" if family == "mixtral" else "moe_intermediate_size"]
    yield Weight(f"{name}.gate.weight", (count, hidden))
    yield Weight(f"{name}.experts.gate_up_proj", (count, 2 * intermediate, hidden))
    yield Weight(f"{name}.experts.down_proj", (count, hidden, intermediate))
    if family == "glm4_moe" and config.get("n_shared_experts"):
        yield from _feed_forward(hidden, intermediate * config["n_shared_experts"], f"{name}.shared_experts", bias=False)
