"""Tiny random models that vLLM and llama.cpp take: heads of 32, and a tokenizer that llama.cpp's converters know."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FOUR = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
}
SPARSE: dict[str, dict[str, Any]] = {
    "qwen3_moe": FOUR | {"num_experts": 4, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "num_key_value_heads": 2},
    "glm4_moe": FOUR | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 128},
}
SCALES = {"embed": 0.08, "lm_head": 0.08, "gate.weight": 0.5, "router.weight": 0.5, "": 0.05}
"""Standard deviations by a part of a weight's name. Routers are sure of their experts, or else rounding to BF16 would choose others."""
SENTENCEPIECE = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma2")
"""Families whose converter reads a tokenizer.model."""
VARIANTS: dict[str, dict[str, Any]] = {
    "attention": {"lora": {"targetModules": ATTENTION}},
    "all linear": {"lora": {"targetModules": [*ATTENTION, *MLP]}},
    "experts": {"lora": {"targetModules": ATTENTION, "targetParameters": EXPERTS}},
    "modulesToSave": {"lora": {"targetModules": ATTENTION, "modulesToSave": ["embed_tokens", "lm_head"]}},
    "DoRA": {"lora": {"targetModules": ATTENTION, "dora": True}},
}


def variant_of(family: str, kind: str) -> dict[str, Any] | None:
    """Return what is trained, or None where the family has no such module. All linear layers of a mixture are its attention and experts."""
    if kind == "experts" and family in DENSE:
        return None
    if kind == "all linear" and family in SPARSE:
        dense = [*ATTENTION, *MLP] if family == "glm4_moe" else ATTENTION
        return {"lora": {"targetModules": dense, "targetParameters": EXPERTS}}
    return VARIANTS[kind]


def make_base(folder: Path, family: str, dtype: Any, tokenizers: Path) -> None:
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from lockstep_train.model.load import model_class

    kind = "sentencepiece" if family in SENTENCEPIECE else "gpt2"
    size = {"sentencepiece": 512, "gpt2": 50257}[kind]
    settled = CONFIG_MAPPING[family](**SHAPE | {"vocab_size": size} | (DENSE | SPARSE)[family])
    settled.save_pretrained(folder)
    torch.manual_seed(3)
    model = model_class(folder).from_config(settled)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # or else a random model says the same of every token
                parameter.normal_(std=next(std for part, std in SCALES.items() if part in name))
    model.to(dtype).save_pretrained(folder)
    shutil.copytree(tokenizers / kind, folder, dirs_exist_ok=True)
