"""Parameters that are told from config.json without torch, against the modules that transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep_sizes.families import shape_from_config
from lockstep_train.memory.shape import read_shape

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
