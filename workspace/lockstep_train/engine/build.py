"""Build of the base model, its adapter and the DeepSpeed engine over both."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep_spec import length
from lockstep_spec.choices import Method, Offload, Precision, Quantization, ZeroStage
from lockstep_spec.memory import bucket_elements
from lockstep_spec.settings import Recomputed
from lockstep_spec.shape import ModelShape
from lockstep_spec.training import OptimizationConfig, TrainingConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.imports import import_method, uncollected
from lockstep_train.base.ranks import Ranks
from lockstep_train.engine.experts import find_balance
from lockstep_train.engine.loss import TokenLoss, tile_head
from lockstep_train.engine.optimizer import torch_optimizer
from lockstep_train.engine.recompute import recompute_layers
from lockstep_train.engine.settings import deepspeed_settings
from lockstep_train.model.attention import choose_attention
from lockstep_train.model.load import load_base
from lockstep_train.model.moe import save_sharded
from lockstep_train.model.trained import describe_trained, make_trainable, refuse_moved
from lockstep_train.report import Reporter
from lockstep_train.zero.parameters import full_shape
from lockstep_train.zero.secondary import check_secondary_shards
from lockstep_train.zero.self_test import self_test
from lockstep_train.zero.start import initialize, prepare_deepspeed, refuse_invalid


def start_model(
    training: TrainingConfig,
    folder: Path,
    plan: length.Plan,
    ranks: Ranks,
    reporter: Reporter,
    recomputed: Recomputed,
    partition: int = 1,
    shape: ModelShape | None = None,
    *,
    joins: bool = False,
) -> tuple[Any, TokenLoss, dict[str, Any]]:
    """Start the engine, tested to keep its state where we look for it; also its loss, and what a manifest says of what is trained. `joins`:
    rows are to hold several documents.
    """
    if training.model.quantization is not Quantization.NONE and training.zero_stage is ZeroStage.STAGE3:  # nothing else would say so
        raise ConfigError(
            f"training.model.quantization {training.model.quantization} can't be used with zeroStage Stage3, which would cut the packed"
            " weights into shards apart from the scales that unpack them; use Stage1 or Stage2, or leave quantization out"
        )
    slow = precision_note(training.precision, ranks.device)
    if slow is not None:
        reporter.say(slow)
    if ranks.device.type == "cpu" or training.optimization.offload is Offload.CPU:
        reporter.say(thread_words(os.environ, torch.get_num_threads()))
    settings = deepspeed_settings(training, plan.accumulation, partition, shape)
    with uncollected():
        prepare_deepspeed()
        import_method(training)
    reporter.startup.done("imports")
    refuse_invalid(settings)
    fresh = plan.done.steps == 0
    if fresh and training.method is Method.LORA:
        refuse_moved(folder, training.lora.target_modules)
    base = load_base(folder, training.precision, settings, ranks.device, reporter.say, training.model.quantization)
    if joins:
        choose_attention(base, training.precision, ranks.device)
    reporter.startup.done("load")
    for layer in recompute_layers(base, recomputed, training.optimization.recompute, reporter.say):
        save_sharded(layer)
    model = make_trainable(base, training, fresh=fresh, say=reporter.say)
    trained = describe_trained(model, training)
    reporter.say(f"{trained['elements']:,} trained elements")
    head, note = tile_head(model)
    balance, warning = find_balance(model)
    engine = start_engine(model, training.optimization, settings)
    engine.train()  # transformers hands out models for evaluation: without dropout or gradient checkpointing
    reporter.startup.done("engine")
    self_test(engine)
    if partition > 1:
        check_secondary_shards(engine.module)
    reporter.startup.done("selfTest")
    if note is not None:
        reporter.say(f"The loss is computed from whole logits, which takes more memory: {note}")
    if warning is not None:
        reporter.say(warning)
    return engine, TokenLoss(engine, head, balance), trained


def thread_words(environment: Mapping[str, str], threads: int) -> str:
    """Return how many threads a rank computes with on CPUs, and what decided it."""
    stated = "OMP_NUM_THREADS" in environment and "LOCKSTEP_DEFAULT_THREADS" not in environment
    return (
        f"Threads of a rank: {threads},"
        f" {'as OMP_NUM_THREADS states' if stated else 'its part of the cores; OMP_NUM_THREADS states another number'}"
    )


def precision_note(precision: Precision, device: torch.device) -> str | None:
    """Note on a precision that works here but is slow: without instructions for it, BF16 took 8 times as long as FP32."""
    if precision is not Precision.BF16 or device.type != "cpu" or platform.machine() != "x86_64":
        return None
    if torch.cpu._is_avx512_bf16_supported():
        return None
    return "This CPU has no instructions for BF16 and computes it slowly; training.precision: FP32 may be several times faster"


def start_engine(model: torch.nn.Module, optimization: OptimizationConfig, settings: dict[str, Any]) -> Any:
    """Start a DeepSpeed engine over the model's trainable parameters."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trainable = [parameter for _, parameter in named]
    optimizer = torch_optimizer(named, optimization)
    bucket = {"reduce_bucket_size": bucket_elements(sum(math.prod(full_shape(parameter)) for parameter in trainable))}
    config = {**settings, "zero_optimization": {**bucket, **settings["zero_optimization"]}}
    return initialize(model, trainable, optimizer, config)
