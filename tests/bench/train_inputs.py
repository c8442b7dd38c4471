"""A base model of random weights, its tokenizer and its data: what both trainers of train.py are given."""

from __future__ import annotations

import json
import math
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 42
SHORTEST, MEDIAN_SHARE, SPREAD = 4, 600 / 4096, 0.9
"""Lengths of ragged samples."""
LEARNING_RATE = 2e-3
LORA = {"rank": 16, "alpha": 32, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}


@dataclass(frozen=True)
class Shape:
    """A model's architecture, as transformers' configuration has it, and how it is trained."""

    config: dict[str, Any]
    sequence: int
    micro: int
    accumulation: int
    gradient_checkpointing: bool
    zero_stage: int
    precisions: tuple[str, ...]
    ragged: bool = False
    """Samples have log-normal lengths, as chats do; else each has `sequence` tokens."""


_LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES = {
    # for BF16 on CPUs that have no instructions for it: a backward matrix product runs at 1 GFLOP/s there, FP32 at 80
    "1m": Shape(
        {
            "model_type": "llama",
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 344,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        sequence=128,
        micro=2,
        accumulation=1,
        gradient_checkpointing=False,
        zero_stage=2,
        precisions=("BF16", "FP32"),
    ),
    "75m": Shape(
        {
            "model_type": "llama",
            "vocab_size": 16384,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
        },
        sequence=512,
        micro=2,
        accumulation=1,
        gradient_checkpointing=False,
        zero_stage=2,
        precisions=("BF16", "FP32"),
    ),
    "20m-ragged": Shape(
        {
            "model_type": "llama",
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1376,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        sequence=512,
        micro=8,
        accumulation=1,
        gradient_checkpointing=False,
        zero_stage=2,
        precisions=("FP32",),
        ragged=True,
    ),
    "8b": Shape(
        {"model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0, **_LLAMA_8B},
        sequence=4096,
        micro=2,
        accumulation=2,
        gradient_checkpointing=True,
        zero_stage=2,
        precisions=("BF16",),
    ),
    # GLM-4.5-Air's layers, but 4 of its 46: one dense, three with 128 experts of which 8 are visited
    "glm-air-slice": Shape(
        {
            "model_type": "glm4_moe",
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "partial_rotary_factor": 0.5,
        },
        sequence=4096,
        micro=2,
        accumulation=2,
        gradient_checkpointing=True,
        zero_stage=2,
        precisions=("BF16",),
    ),
}


def make_model(folder: Path, shape: Shape, device: str) -> int:
    """Write the base model and return its number of parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, **{letter: index + 2 for index, letter in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(str(folder))
    torch.manual_seed(SEED)
    options = dict(shape.config)
    config = AutoConfig.for_model(options.pop("model_type"), **options, bos_token_id=0, eos_token_id=1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(str(folder))
    return sum(parameter.numel() for parameter in model.parameters())


def make_data(path: Path, shape: Shape, samples: int) -> None:
    """Samples of exactly `sequence` tokens with the first and the last one: a letter is a token. So there is no padding anywhere.

    Ragged ones have the lengths of chats, a median of 600 in 4,096 tokens: SHORTEST more than a log-normal number, cut at `sequence`.
    """
    draw = random.Random(SEED)  # noqa: S311 (sample text)
    with path.open("w") as file:
        for _ in range(samples):
            words = " ".join("".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8))) for _ in range(shape.sequence))
            length = min(shape.sequence, SHORTEST + int(draw.lognormvariate(math.log(MEDIAN_SHARE * shape.sequence), SPREAD)))
            file.write(json.dumps({"text": words[: (length if shape.ragged else shape.sequence) - 2]}) + "\n")


def lockstep_run(folder: Path, shape: Shape, precision: str, ranks: int, steps: int) -> dict[str, Any]:
    """run.json of the same training."""
    return {
        "format": "lockstep-run/1",
        "job": {"name": "bench", "namespace": "bench", "uid": None},
        "runDir": str(folder / f"run-{precision}"),
        "training": {
            "model": {"name": str(folder / "model")},
            "lora": {"rank": LORA["rank"], "alpha": LORA["alpha"], "dropout": "0", "targetModules": LORA["targets"]},
            "zeroStage": f"Stage{shape.zero_stage}",
            "precision": precision,
            "seed": SEED,
            "data": {"path": str(folder / "data.jsonl"), "maxLength": shape.sequence},
            "optimization": {
                "epochs": 1,
                "maxSteps": steps,
                "learningRate": repr(LEARNING_RATE),
                "microBatchSize": shape.micro,
                "globalBatchSize": shape.micro * shape.accumulation * ranks,
                "warmupSteps": "0",
                "schedule": "Cosine",
                "recompute": "All" if shape.gradient_checkpointing else "None",
            },
            "evaluation": None,
            "checkpoint": {"everySteps": 1_000_000, "keep": 2, "resumeFrom": "None"},
            "reportTo": [],
        },
    }
