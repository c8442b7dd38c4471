"""Parameters that are told from config.json without torch, against the modules that transformers and peft make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep_sizes.choices import ZeroStage
from lockstep_sizes.families import shape_from_config
from lockstep_sizes.memory import trained_elements
from lockstep_sizes.settings import Adapter, Settings
from lockstep_train.config import LoraConfig
from lockstep_train.memory.shape import read_shape
from lockstep_train.model.lora import add_lora

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
    {"model_type": "mixtral", "tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [], "head_dim": 16, **EXPERTS},
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
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama", "tie_word_embeddings": tied}))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    lora = LoraConfig(rank=4, alpha=4, dropout=0.0, target_modules=tuple(targets), modules_to_save=tuple(whole))
    trained = sum(parameter.numel() for parameter in add_lora(model, lora, seed=1).parameters() if parameter.requires_grad)
    settings = Settings(16, 1, Adapter(4, tuple(targets), modules_to_save=tuple(whole)), ZeroStage.STAGE2)
    assert trained_elements(read_shape(tmp_path), settings) == trained
