"""Parameters counted from config.json without torch, against the modules that transformers and peft make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lockstep_spec.activations import layer_bytes
from lockstep_spec.choices import Method, Precision, ZeroStage
from lockstep_spec.families import shape_from_config
from lockstep_spec.memory import trained_elements
from lockstep_spec.settings import Adapter, Settings
from lockstep_spec.training import LoraConfig
from lockstep_train.memory.agree import MEASURED, read_shape
from lockstep_train.model.trained import add_lora
from lockstep_train.model.weight_files import PRECISIONS

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft asks for
SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
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
    {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [], "head_dim": 16, **EXPERTS},
    {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_local_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16, **EXPERTS},
    {"model_type": "glm4_moe", "tie_word_embeddings": False, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "head_dim": 16, "n_group": 1, "topk_group": 1, **EXPERTS},
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
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama", "tie_word_embeddings": tied}))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    lora = LoraConfig(rank=4, alpha=4, dropout=0.0, target_modules=tuple(targets), modules_to_save=tuple(whole))
    trained = sum(parameter.numel() for parameter in add_lora(model, lora, seed=1).parameters() if parameter.requires_grad)
    settings = Settings(16, 1, Adapter(4, tuple(targets), modules_to_save=tuple(whole)), ZeroStage.STAGE2)
    assert trained_elements(read_shape(tmp_path), settings) == trained


TOKENS = 64
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
    "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 64,
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


def kept_of_a_layer(family: str, method: Method, precision: Precision) -> int:
    """What autograd keeps of a model with one layer more, beyond its weights."""
    two, three = (kept(CONFIG_MAPPING[family](**ARCHITECTURES[family], num_hidden_layers=layers), method, precision) for layers in (2, 3))
    return three - two


def kept(config: Any, method: Method, precision: Precision) -> int:
    model = AutoModelForCausalLM.from_config(config, dtype=PRECISIONS[precision])
    model.train()
    if method is Method.LORA:
        model.requires_grad_(False)
        model.enable_input_require_grads()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tensors: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.randint(0, 128, (1, TOKENS)), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in tensors.items() if pointer not in weights)


@pytest.mark.parametrize(("method", "precision"), [(Method.FULL, Precision.FP32), (Method.LORA, Precision.BF16)])
@pytest.mark.parametrize("family", sorted(MEASURED))
def test_a_layers_activations_are_what_autograd_keeps(tmp_path: Path, family: str, method: Method, precision: Precision) -> None:
    CONFIG_MAPPING[family](**ARCHITECTURES[family], num_hidden_layers=2).save_pretrained(tmp_path)
    shape = read_shape(tmp_path, torch.device("cpu"))
    settings = Settings(TOKENS, 1, Adapter(0, ("lm_head",)), ZeroStage.STAGE2, precision, method)
    assert layer_bytes(shape, settings) == pytest.approx(kept_of_a_layer(family, method, precision), rel=0.1)
    assert shape.unmeasured == ""
