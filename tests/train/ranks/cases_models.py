"""Tiny models of every kind, trained a few steps each in one group of ranks: what came out is written as JSON for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import rank_cases
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lockstep_spec.choices import NonFinitePolicy, Quantization
from lockstep_spec.settings import Level, Recomputed
from lockstep_spec.training import TrainingConfig
from lockstep_train import __main__ as trainer
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.imports import import_bitsandbytes
from lockstep_train.base.limits import UNWATCHED
from lockstep_train.base.runfile import parse_training, rank_environment
from lockstep_train.data.sequences.batches import Batch
from lockstep_train.data.tokens.encode import IGNORED
from lockstep_train.engine import build
from lockstep_train.engine.build import start_model
from lockstep_train.engine.clock import Clock
from lockstep_train.engine.experts import count_experts
from lockstep_train.engine.step import Stepper
from lockstep_train.export import write_adapter
from lockstep_train.model import trained as trained_part
from lockstep_train.model.load import model_class, quiet_transformers
from lockstep_train.model.quantize import keep_trainable, loading_options
from lockstep_train.report import Reporter
from lockstep_train.zero import zero_access

STEPS = 3
VOCABULARY = 96
SHARED = {
    "vocab_size": VOCABULARY, "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.2,
}  # fmt: skip
BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
"""Rows of all layers are whole blocks of NF4."""
MOE = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}


WIDE = SHARED | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FOUR: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = ROUTED | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 8},
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "glm4_moe_lite": LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    "gpt_oss": FOUR | {"sliding_window": 8},
    "granite": {"logits_scaling": 8.0, "tie_word_embeddings": True},
    "granitemoe": FOUR,
    "granitemoehybrid": FOUR | MAMBA | {"mamba_n_heads": 8, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]},
    "lfm2_moe": ROUTED | {"num_hidden_layers": 3, "num_dense_layers": 1, "num_experts": 4,
        "layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": FOUR | {"intermediate_size_mlp": 96, "num_experts_per_tok": 1, "num_hidden_layers": 4, "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2},
    "minimax": FOUR | {"block_size": 8},
    "minimax_m2": FOUR,
    "mistral": {"sliding_window": 8},
    "nemotron_h": ROUTED | {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
            "n_groups": 2,
        "chunk_size": 8, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32,
    },
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "qwen2_moe": ROUTED | {"shared_expert_intermediate_size": 32, "num_experts": 4},
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | ROUTED | {"shared_expert_intermediate_size": 32, "num_experts": 4},
    "smollm3": {},
}  # fmt: skip
"""Further families by model_type: what each has beside WIDE."""
EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_EYES: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 1,
        "temporal_patch_size": 1,
    "out_hidden_size": 64, "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
}  # fmt: skip
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", EYES, {"mm_tokens_per_image": 4, "image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93}),
    "mistral3": ("mistral", EYES | {"model_type": "pixtral", "head_dim": 16}, {"image_token_index": 95, "spatial_merge_size": 1}),
    "qwen3_vl": ("qwen3_vl_text", QWEN_EYES,
        {"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93, "vision_end_token_id": 92}),
}  # fmt: skip
"""Families that also see: model_type → that of its text, its eyes, and tokens."""


def configuration(family: str) -> Any:
    if family in OTHERS:
        wide = {name: value for name, value in WIDE.items() if name != "num_hidden_layers" or "layers_block_type" not in OTHERS[family]}
        return CONFIG_MAPPING[family](**wide | OTHERS[family])
    if family in SEEING:
        text, eyes, tokens = SEEING[family]
        return CONFIG_MAPPING[family](text_config=WIDE | OTHERS.get(text, {}) | {"model_type": text}, vision_config=eyes, **tokens)
    families = {
        "llama": lambda: transformers.LlamaConfig(**SHARED),
        "blocks": lambda: transformers.LlamaConfig(**SHARED | BLOCKS),
        "tied": lambda: transformers.LlamaConfig(**SHARED, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**SHARED),
        "qwen3": lambda: transformers.Qwen3Config(**SHARED),
        "glm4_moe": lambda: transformers.Glm4MoeConfig(
            **SHARED, **MOE, n_routed_experts=6, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHARED, **MOE, num_experts=6, norm_topk_prob=True),
        # The balance loss of a micro-batch is no mean over its tokens: it depends on which rows are together, so on the number of ranks.
        "qwen3_moe unbalanced": lambda: transformers.Qwen3MoeConfig(
            **SHARED, **MOE, num_experts=6, norm_topk_prob=True, router_aux_loss_coef=0.0
        ),
        "mixtral": lambda: transformers.MixtralConfig(**SHARED, num_local_experts=4, num_experts_per_tok=2),
    }
    return families[family]()


def make_family(folder: Path, family: str, **changes: Any) -> None:
    settled = configuration(family)
    for name, value in changes.items():
        setattr(settled.get_text_config(), name, value)
    settled.save_pretrained(folder)
    torch.manual_seed(3)
    model = model_class(folder).from_config(settled)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    model.save_pretrained(folder)


NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0}
"""Else Stage3 would never let go of parameters as small as these, and what forgets to gather one would go unseen."""


def settings(model: Path, stage: str, variant: dict[str, Any]) -> TrainingConfig:
    lora = {"rank": 3, "alpha": 6, "dropout": "0", "targetModules": ["q_proj", "v_proj"], **variant.get("lora", {})}
    return parse_training(
        {
            "model": {"name": str(model), "quantization": variant.get("quantization", "None")},
            "method": variant.get("method", "LoRA"),
            "lora": lora,
            "zeroStage": stage,
            "precision": variant.get("precision", "FP32"),
            "seed": 42,
            "data": {"path": "unused", "maxLength": 64},
            "optimization": {
                "epochs": 1,
                "learningRate": variant.get("learningRate", "2e-2"),
                "microBatchSize": 2,
                "maxGradientNorm": "1.0",
                "recompute": "All" if variant.get("gc", True) else "None",
                **variant.get("optimization", {}),
            },
            "evaluation": None,
            "checkpoint": {"everySteps": 1, "keep": 2, "resumeFrom": "Auto"},
            "deepspeed": {"zero_optimization": NOTHING_RESIDENT} if stage == "Stage3" else None,
        }
    )


def global_batch(step: int) -> list[tuple[int, torch.Tensor]]:
    """Four rows of tokens [24], of which the first `length` are real."""
    draw = torch.Generator().manual_seed(100 + step)
    return [(24 - 5 * row, torch.randint(0, VOCABULARY, (24,), generator=draw)) for row in range(4)]


def batch_of(rows: list[tuple[int, torch.Tensor]]) -> Batch:
    ids = torch.stack([row for _, row in rows])
    real = torch.stack([torch.arange(24) < length for length, _ in rows])
    return Batch(ids, torch.where(real, ids, IGNORED), real)


def mine(rows: list[Any], ranks: Any) -> list[Any]:
    return rows[ranks.rank :: ranks.world_size]


def take_steps(engine: Any, loss: Any, ranks: Any, usage: Any = None, evaluated: bool = False, each: int | None = None) -> list[float]:
    """The loss of each step; `evaluated`: with a forward pass for evaluation before it. `each`: rows of a micro-batch; all in one by
    default.
    """
    looking = usage.look_at if usage is not None else lambda batch: None
    stepper = Stepper(engine, loss, ranks, NotSaving(), UNWATCHED, seed=42, policy=NonFinitePolicy.STOP, looking=looking)
    losses = []
    for step in range(1, STEPS + 1):
        rows = global_batch(step)
        own = mine(rows, ranks)
        batches = [batch_of(own[first : first + (each or len(own))]) for first in range(0, len(own), each or len(own))]
        tokens = sum(length - 1 for length, _ in rows)
        if evaluated:
            logits_of(engine)
            engine.train()
        losses.append(stepper.take(step, batches, tokens, lambda: False, Clock(ranks.device)).loss)
    return losses


class NotSaving:
    busy = False

    def before_update(self) -> None:
        pass


PROBE = torch.arange(40).view(2, 20) % VOCABULARY


def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=PROBE, use_cache=False).logits
    return logits


def recomputed_of(variant: dict[str, Any]) -> Recomputed:
    """`gc`: True for all of every layer, False for nothing, or a level and the number of layers at it."""
    stated = variant.get("gc", True)
    return Recomputed(Level[stated[0]], stated[1]) if isinstance(stated, list) else Recomputed(Level.ALL if stated else Level.NONE)


def start(folder: Path, stage: str, variant: dict[str, Any], ranks: Any, accumulation: int = 1) -> tuple[Any, Any, dict[str, Any]]:
    plan: Any = SimpleNamespace(accumulation=accumulation, done=SimpleNamespace(steps=0))
    engine, loss, trained = start_model(
        settings(folder, stage, variant), folder, plan, ranks, Reporter(None, ranks.rank), recomputed_of(variant)
    )
    return engine, loss, trained


def starve(model: Any, ranks: Any) -> None:
    """Every token of rank 0 goes to expert 0 (and another one), and none of any other rank."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[0] = 9.0 if ranks.first else -9.0


def offer_inference_format(there: bool) -> None:
    """As on a CPU with AVX512-BF16, for which bitsandbytes has a format of NF4 of its own, or as on one without."""
    import_bitsandbytes()
    from bitsandbytes.nn import modules

    modules.has_avx512bf16 = lambda: there


def train_variant(folder: Path, stage: str, name: str, variant: dict[str, Any], ranks: Any) -> dict[str, Any]:
    model = folder / variant["family"]
    if variant.get("inferenceFormat") is not None:
        offer_inference_format(variant["inferenceFormat"])
    try:
        engine, loss, trained = start(model, stage, variant, ranks)
    except ConfigError as error:
        return {"refused": str(error)}
    if variant.get("starve"):
        starve(engine.module, ranks)
    usage = count_experts(engine.module, ranks.device)
    result: dict[str, Any] = {"losses": take_steps(engine, loss, ranks, usage, variant.get("evaluated", False))}
    if usage is not None:
        result["usage"] = {item.layer: item.counts for item in usage.collect()}
    result["shapes"] = {item: list(shape) for item, shape in zero_access.parameter_shapes(engine).items()}
    live = logits_of(engine)
    masters = {item: value.cpu().clone() for item, value in zero_access.gather_masters(engine)}
    exported = ranks.first and ranks.world_size > 1 and trained["config"] is not None
    if exported:
        output = folder / f"{name}-{stage}-{ranks.world_size}"
        write_adapter(output, masters, trained, variant.get("precision", "FP32"), {})
        result["names"] = trained["names"]
    dist.barrier()
    engine.destroy()
    if exported:
        result |= compared(model, output, live, variant)
    dist.barrier()
    return result


def compared(model: Path, adapter: Path, live: torch.Tensor, variant: dict[str, Any]) -> dict[str, Any]:
    """The adapter folder as peft loads it, beside the live model: the greatest difference of logits, and peft's own names."""
    dtype = {"BF16": torch.bfloat16, "FP32": torch.float32}[variant.get("precision", "FP32")]
    options = loading_options(Quantization(variant.get("quantization", "None")), dtype)
    base = model_class(model).from_pretrained(model, dtype=dtype, **options)
    if variant.get("quantization") == "NF4":
        keep_trainable(base)
    plain = logits_of(base)
    loaded = peft.PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False)
    for name, parameter in loaded.named_parameters():
        if "lora_" in name:  # peft makes them FP32 where it can't read a dtype off packed weights
            parameter.data = parameter.data.to(dtype)
    difference = (logits_of(loaded) - live).abs().max().item()
    names = sorted(peft.get_peft_model_state_dict(loaded, save_embedding_layers=False))
    return {
        "difference": difference,
        "moved": (plain - live).abs().max().item(),
        "peft": names,
        "written": sorted(load_file(adapter / "adapter_model.safetensors")),
    }


def model_variants(folder: str, stage: str, variants: dict[str, Any], output: str) -> None:
    """Train each variant in this one group. Rank 0 adds what came out to `output`."""
    quiet_transformers()
    ranks = engine_ranks.join(rank_environment())
    if ranks.first:
        for family in sorted({variant["family"] for variant in variants.values()}):
            if not (Path(folder) / family).exists():
                make_family(Path(folder) / family, family)
    dist.barrier()
    for name, variant in variants.items():
        result = train_variant(Path(folder), stage, name, variant, ranks)
        if ranks.first:
            rank_cases.add_result(output, name, result)
    engine_ranks.leave()


def train_unaware() -> int:
    """Train as one that doesn't compare what peft trains with what is named."""
    build.refuse_moved = lambda *_: None
    trained_part.difference = lambda *_: ""
    return trainer.main([])


def instructions_are(capability: str) -> None:
    """torch computes with the instructions that its environment names."""
    assert torch.backends.cpu.get_cpu_capability() == capability, torch.backends.cpu.get_cpu_capability()


def make_whole_family(folder: str, family: str, forced: str | None = None, **changes: Any) -> None:
    """With a tokenizer, so that a run can use it. `forced`: config.json asks for this experts_implementation."""
    rank_cases.make_model(folder)
    Path(folder, "model.safetensors").unlink()
    make_family(Path(folder), family, vocab_size=258, **changes)
    if forced is not None:
        path = Path(folder, "config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "experts_implementation": forced}))


def compare_model(folder: str, logits: str) -> None:
    """The folder as transformers loads it gives exactly the live model's logits."""
    mine = logits_of(model_class(Path(folder)).from_pretrained(folder))
    live = load_file(logits)["logits"]
    assert torch.equal(mine, live), (mine - live).abs().max()
    assert AutoTokenizer.from_pretrained(folder).eos_token == "</s>"
