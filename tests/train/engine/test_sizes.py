"""Parameters counted from config.json without torch, against the modules that transformers and peft make of it."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lockstep_spec.activations import level_bytes
from lockstep_spec.choices import Method, Precision, Recompute, ZeroStage
from lockstep_spec.families import shape_from_config
from lockstep_spec.memory import trained_elements
from lockstep_spec.settings import Level, Recomputed, Settings
from lockstep_spec.training import LoraConfig
from lockstep_train.engine.recompute import recompute_layers
from lockstep_train.memory.agree import MEASURED, read_shape
from lockstep_train.model.trained import add_lora
from lockstep_train.model.weight_files import PRECISIONS
from support.peak_memory import Made

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # which peft asks for
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing_enable` is deprecated"
    ),  # its new name is not in every version of transformers that trains
]
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", "tie_word_embeddings": False, "head_dim": 16},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
    {"model_type": "phi3", "tie_word_embeddings": False, "pad_token_id": 0},
    {"model_type": "glm4", "tie_word_embeddings": False, "attention_bias": True, "head_dim": 16, "pad_token_id": 0},
    {"model_type": "olmo2", "tie_word_embeddings": False, "attention_bias": True},
    {"model_type": "gemma2", "head_dim": 16},
    {"model_type": "gemma3_text", "head_dim": 16},
    {"model_type": "mixtral", "tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [],
        "head_dim": 16, **EXPERTS},
    {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_local_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "head_dim": 16, **EXPERTS},
    {"model_type": "glm4_moe", "tie_word_embeddings": False, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "use_qk_norm": True, "attention_bias": True, "head_dim": 16, "n_group": 1, "topk_group": 1, **EXPERTS},
]  # fmt: skip


@pytest.mark.parametrize("stated", CONFIGS, ids=lambda stated: str(stated["model_type"]))
def test_a_familys_parameters_are_those_of_transformers_modules(tmp_path: Path, stated: dict[str, Any]) -> None:
    config = SMALL | stated
    (tmp_path / "config.json").write_text(json.dumps(config))
    told, made = shape_from_config(config), read_shape(tmp_path)
    assert sorted(told.weights, key=lambda w: w.name) == sorted(made.weights, key=lambda w: w.name)
    assert {**vars(told), "weights": ()} == {**vars(made), "weights": ()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("targets", "whole"),
    [
        (["q_proj"], []),
        (["q_proj"], ["lm_head"]),
        (["q_proj"], ["embed_tokens"]),
        (["q_proj"], ["embed_tokens", "lm_head"]),
        (["q_proj", "lm_head"], []),
    ],
    ids=" ".join,
)
def test_as_many_elements_are_counted_as_an_adapter_trains(tmp_path: Path, tied: bool, targets: list[str], whole: list[str]) -> None:
    """A trained copy of a head that is tied to the embedding, and an adapter on it, are beside the one tensor that both are."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama", "tie_word_embeddings": tied}))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    lora = LoraConfig(rank=4, alpha=4, dropout=0.0, target_modules=tuple(targets), modules_to_save=tuple(whole))
    trained = sum(parameter.numel() for parameter in add_lora(model, lora, seed=1).parameters() if parameter.requires_grad)
    settings = Settings(16, 1, lora, ZeroStage.STAGE2)
    assert trained_elements(read_shape(tmp_path), settings) == trained


TOKENS = 256
FEW = ("llama", "gpt2", "qwen3_moe")
"""Families of `make test`."""
HEADS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN: dict[str, Any] = HEADS | {"intermediate_size": 1024}
GROUPED: dict[str, Any] = PLAIN | {"num_key_value_heads": 2, "head_dim": 64}
ROUTED: dict[str, Any] = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
GLM_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
LATENT: dict[str, Any] = ROUTED | GLM_ROUTED | {
    "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32,
        "v_head_dim": 64,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {"v_head_dim": 32},  # narrower than keys: on CPUs without a kernel
    "deepseek_v3": LATENT,
    "falcon": HEADS,
    "gemma": GROUPED,
    "gemma2": GROUPED,
    "gemma3_text": GROUPED,
    "glm4": GROUPED,
    "glm4_moe": ROUTED | GLM_ROUTED,
    "gpt2": HEADS | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": PLAIN,
    "llama": GROUPED,
    "mistral": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo2": PLAIN | {"num_key_value_heads": 2},
    "opt": HEADS | {"ffn_dim": 1024, "word_embed_proj_dim": 256, "dropout": 0.0},
    "phi": PLAIN,
    "phi3": PLAIN | {"num_key_value_heads": 2},
    "qwen2": GROUPED,
    "qwen2_moe": ROUTED | {"num_experts": 8, "shared_expert_intermediate_size": 256},
    "qwen3": GROUPED,
    "qwen3_moe": ROUTED | {"num_experts": 8},
    "starcoder2": PLAIN | {"num_key_value_heads": 2},
}


def kept_of_a_layer(family: str, method: Method, precision: Precision, level: Level) -> tuple[int, torch.Tensor]:
    """Bytes that are alive after the forward pass of a model with one layer more, and the gradients of its weights, or with an adapter of
    its embeddings.
    """
    (two, _), (three, gradients) = (
        kept(CONFIG_MAPPING[family](**ARCHITECTURES[family], num_hidden_layers=layers), method, precision, level) for layers in (2, 3)
    )
    return three - two, gradients


def kept(config: Any, method: Method, precision: Precision, level: Level) -> tuple[int, torch.Tensor]:
    torch.manual_seed(1)
    with Made() as made:
        model = AutoModelForCausalLM.from_config(config, dtype=PRECISIONS[precision])
        model.train()
        model.requires_grad_(method is Method.FULL)
        embedded = model.get_input_embeddings()(torch.randint(0, 128, (1, TOKENS))).detach().requires_grad_()
        recompute_layers(model, Recomputed(level), Recompute.ALL, print)
        gc.collect()
        before = made.held_bytes
        logits = model(inputs_embeds=embedded, use_cache=False).logits
        held = made.held_bytes - before
        trained = [embedded, *(weight for weight in model.parameters() if weight.requires_grad)]
        gradients = torch.autograd.grad(logits.float().square().mean(), trained, allow_unused=True)
    return held, torch.cat([gradient.float().flatten() for gradient in gradients if gradient is not None])


@pytest.mark.parametrize(("method", "precision"), [(Method.FULL, Precision.FP32), (Method.LORA, Precision.BF16)])
@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.long]) for name in sorted(MEASURED)])
def test_a_layer_keeps_what_the_plan_counts_at_each_level_and_its_gradients_are_the_same(
    tmp_path: Path, family: str, method: Method, precision: Precision
) -> None:
    CONFIG_MAPPING[family](**ARCHITECTURES[family], num_hidden_layers=2).save_pretrained(tmp_path)
    shape = read_shape(tmp_path, torch.device("cpu"))
    settings = Settings(TOKENS, 1, LoraConfig(0, 1, 0.0, ("lm_head",)), ZeroStage.STAGE2, precision, method)
    sizes, gradients = zip(*(kept_of_a_layer(family, method, precision, level) for level in Level), strict=True)
    assert [level_bytes(shape, settings, level) for level in Level] == [pytest.approx(size, rel=0.1) for size in sizes]
    assert all(torch.equal(gradients[0], of_level) for of_level in gradients)
    assert shape.unmeasured == ""
