"""What ranks really hold at the worst moment of a step, beside the memory plan."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from cases_models import NOTHING_RESIDENT, NotSaving, recomputed_of
from rank_cases import add_result
from transformers import AutoModelForCausalLM

from lockstep_spec.choices import NonFinitePolicy, Precision
from lockstep_spec.memory import Place, estimate
from lockstep_spec.settings import size_settings
from lockstep_spec.training import TrainingConfig
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.runfile import parse_training, rank_environment
from lockstep_train.data.sequences.batches import Batch
from lockstep_train.engine.build import start_model
from lockstep_train.engine.clock import Clock
from lockstep_train.engine.step import Stepper
from lockstep_train.memory.agree import read_shape
from lockstep_train.model.load import quiet_transformers
from lockstep_train.model.weight_files import PRECISIONS
from lockstep_train.report import Reporter
from support.peak_memory import PeakMemory

VOCABULARY = 2048
TOKENS = 512
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ACCUMULATION = 2
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LATENT = {
    "head_dim": 16,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 2,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MOE = {"moe_intermediate_size": 256, "num_experts_per_tok": 2, "num_experts": 16}
NARROW_EXPERTS = {
    "n_routed_experts": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 8,
}
"""As GLM-4.5-Air's: what a token's experts give back is wider than they are."""


def configuration(family: str) -> Any:
    """Large enough that each item of the plan is some megabytes."""
    narrow = {name: SHARED[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    families = {
        "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SHARED, **LATENT}),
        "glm4_moe": lambda: transformers.Glm4MoeConfig(**SHARED, **NARROW_EXPERTS),
        "gpt2": lambda: transformers.GPT2Config(**narrow, n_inner=768, bos_token_id=0, eos_token_id=0, **NO_DROPOUT),
        "opt": lambda: transformers.OPTConfig(**narrow, ffn_dim=1024, word_embed_proj_dim=256, dropout=0.0),
        "llama": lambda: transformers.LlamaConfig(**SHARED),
        "gemma2": lambda: transformers.Gemma2Config(**SHARED),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHARED, **MOE, norm_topk_prob=True),
    }
    return families[family]()


def training_of(folder: Path, variant: dict[str, Any]) -> TrainingConfig:
    stage = variant["stage"]
    return parse_training(
        {
            "model": {"name": str(folder)},
            "method": variant.get("method", "LoRA"),
            "lora": {"rank": 8, "alpha": 8, "dropout": "0", "targetModules": PROJECTIONS, **variant.get("lora", {})},
            "zeroStage": stage,
            "precision": variant.get("precision", "BF16"),
            "seed": 42,
            "data": {"path": "unused", "maxLength": TOKENS},
            "optimization": {
                "epochs": 1,
                "learningRate": "1e-4",
                "microBatchSize": 1,
                "maxGradientNorm": "1.0",
                "recompute": "Auto",
            },
            "evaluation": None,
            "checkpoint": {"everySteps": 1, "keep": 2, "resumeFrom": "Auto"},
            "deepspeed": {"zero_optimization": NOTHING_RESIDENT} if stage == "Stage3" else None,
        }
    )


class Parts:
    """Marks the parts of a step as the step names them."""

    def __init__(self, peak: PeakMemory) -> None:
        self._peak = peak

    def at(self, place: str) -> None:
        self._peak.mark(place.split(" of ", maxsplit=1)[0])


def micro_batch(device: torch.device, tokens: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (1, tokens), device=device)
    return Batch(ids, ids.clone(), torch.ones_like(ids, dtype=torch.bool))


def peak_of(folder: Path, variant: dict[str, Any], ranks: engine_ranks.Ranks) -> dict[str, Any]:
    """The most that tensors took in each part of the second step, and the plan's items of the same run."""
    training = training_of(folder, variant)
    place = Place(ranks.world_size, ranks.local_world_size, gpu=ranks.device.type == "cuda")
    recomputed = recomputed_of({"gc": False, **variant})
    items = estimate(read_shape(folder, ranks.device), replace(size_settings(training), chosen=recomputed), place)
    plan: Any = SimpleNamespace(accumulation=ACCUMULATION, done=SimpleNamespace(steps=0))
    with PeakMemory(ranks.device) as peak:
        engine, loss, _ = start_model(training, folder, plan, ranks, Reporter(None, ranks.rank), recomputed)
        stepper = Stepper(engine, loss, ranks, NotSaving(), Parts(peak), seed=1, policy=NonFinitePolicy.STOP)
        for step, tokens in ((1, 16), (2, TOKENS)):
            gc.collect()
            peak.peaks.clear()  # the first step, which is short, makes the optimizer's state
            batches = [micro_batch(ranks.device, tokens) for _ in range(ACCUMULATION)]
            learned = ACCUMULATION * ranks.world_size * (tokens - 1)
            stepper.take(step, batches, learned, lambda: False, Clock(ranks.device))
    engine.destroy()
    return {"peaks": peak.peaks, "items": {item.name: item.size_bytes for item in items}}


def peak_variants(folder: str, variants: dict[str, Any], output: str) -> None:
    """Each variant in this one group; rank 0 adds what came out."""
    quiet_transformers()
    ranks = engine_ranks.join(rank_environment())
    for name, variant in variants.items():
        model = Path(folder) / name
        if ranks.first:
            torch.manual_seed(3)
            made = AutoModelForCausalLM.from_config(configuration(variant["family"]))
            made.to(PRECISIONS[Precision(variant.get("precision", "BF16"))]).save_pretrained(model)
        dist.barrier()
        result = peak_of(model, variant, ranks)
        if ranks.first:
            add_result(output, name, result)
        dist.barrier()
    engine_ranks.leave()
