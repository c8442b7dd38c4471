"""Build of the base model, its adapter and the DeepSpeed engine over both."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep_spec import length
from lockstep_spec.choices import Offload, Precision, ZeroStage
from lockstep_spec.memory import bucket_elements
from lockstep_spec.shape import ModelShape
from lockstep_spec.training import OptimizationConfig, TrainingConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.imports import import_engine, import_method, replaced
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.zero.self_test import self_test
from lockstep_train.data.isolation import choose_attention
from lockstep_train.data.tokens.pool import usable_cores
from lockstep_train.engine.experts import find_balance
from lockstep_train.engine.loss import TokenLoss, tile_head
from lockstep_train.engine.optimizer import torch_optimizer
from lockstep_train.engine.secondary import check_secondary_shards
from lockstep_train.engine.settings import deepspeed_settings
from lockstep_train.model.load import load_base
from lockstep_train.model.moe import save_sharded
from lockstep_train.model.quantize import check_quantization
from lockstep_train.model.trained import describe_trained, make_trainable
from lockstep_train.report import Reporter

QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
"""Settings of zero_optimization by which weights are gathered, or kept, in 8 bits."""


def start_model(
    training: TrainingConfig,
    folder: Path,
    plan: length.Plan,
    ranks: Ranks,
    reporter: Reporter,
    partition: int = 1,
    shape: ModelShape | None = None,
) -> tuple[Any, TokenLoss, dict[str, Any]]:
    """Start the engine, tested to keep its state where we look for it; also its loss, and what a manifest says of what is trained."""
    check_quantization(training)
    slow = precision_note(training.precision, ranks.device)
    if slow is not None:
        reporter.say(slow)
    settings = deepspeed_settings(training, plan.accumulation, partition, shape)
    prepare_deepspeed()
    import_method(training)
    reporter.startup.done("imports")
    refuse_invalid(settings)
    share_cores(training.optimization, ranks.local_world_size)
    base = load_base(folder, training.precision, settings, ranks.device, reporter.say, training.model.quantization)
    choose_attention(base, training, ranks.device, reporter.say)
    reporter.startup.done("load")
    if training.optimization.gradient_checkpointing:
        recompute_activations(base)
    elif training.zero_stage is ZeroStage.STAGE3:
        save_sharded(base)
    model = make_trainable(base, training, fresh=plan.done.steps == 0)
    trained = describe_trained(model, training)
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


def prepare_deepspeed() -> Any:
    """Prepare DeepSpeed over the joined process group, without its compiled operators. Before a model is loaded.

    On CPU it would compile a shared-memory all-reduce (31 s, needs g++ and ninja), which only tensor-parallel inference
    calls: training's collectives go through the process group. So it is marked as not available; pods need no compiler.
    """
    deepspeed = import_engine()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    return deepspeed


def share_cores(optimization: OptimizationConfig, ranks_per_node: int) -> None:
    """Set the threads of an update that runs on CPUs, with offload: by this rank's part of the cores, unless the user has set OMP_NUM_THREADS. What the agent sets,
    one thread a rank, is for ranks that compute on GPUs, or on as many cores as there are ranks."""
    ours = (None, os.environ.get("LOCKSTEP_DEFAULT_THREADS"))
    if optimization.offload is Offload.CPU and os.environ.get("OMP_NUM_THREADS") in ours:
        torch.set_num_threads(max(1, usable_cores() // ranks_per_node))


def precision_note(precision: Precision, device: torch.device) -> str | None:
    """Note on a precision that works here but is slow: without instructions for it, BF16 took 8 times as long as FP32."""
    if precision is not Precision.BF16 or device.type != "cpu" or platform.machine() != "x86_64":
        return None
    if torch.cpu._is_avx512_bf16_supported():
        return None
    return "This CPU has no instructions for BF16 and computes it slowly; training.precision: FP32 may be several times faster"


def recompute_activations(base: Any) -> None:
    """Turn on gradient checkpointing. Non-reentrant: the other kind loses gradients where a layer's input needs none, as on a frozen base."""
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def refuse_invalid(settings: dict[str, Any]) -> None:
    """Raise ConfigError for what DeepSpeed refuses, before minutes go into loading a model."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.precision_config import get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config
    from pydantic import ValidationError

    try:
        get_zero_config(settings)
        get_float16_config(settings)
    except ValidationError as error:
        raise ConfigError(f"training.deepspeed: DeepSpeed refuses it: {' '.join(str(error).split())}") from error
    _refuse_quantized_bf16(settings)
    if settings["fp16"]["enabled"] and not get_accelerator().is_fp16_supported():
        raise ConfigError("training.precision is FP16, which this device can't compute in; BF16 and FP32 can be used")


def _refuse_quantized_bf16(settings: dict[str, Any]) -> None:
    """Refuse quantized BF16 weights where DeepSpeed can't have them: before its change 8215 (2026-08) its quantizer took their bits for FP16, which trains on wrong values silently.
    Since then it takes the format to give back."""
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    chosen = [name for name in QUANTIZED if settings["zero_optimization"].get(name)]
    if chosen and settings["bf16"]["enabled"] and "dtype" not in inspect.signature(CUDAQuantizer.dequantize).parameters:
        version = importlib.metadata.version("deepspeed")
        raise ConfigError(
            f"training.deepspeed.zero_optimization.{chosen[0]} with training.precision BF16 computes with wrong values in DeepSpeed {version}; leave it out, or use "
            "the image of this version of Lockstep"
        )


def start_engine(model: torch.nn.Module, optimization: OptimizationConfig, settings: dict[str, Any]) -> Any:
    """Start a DeepSpeed engine over the model's trainable parameters."""
    deepspeed = prepare_deepspeed()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    trainable = [parameter for _, parameter in named]
    optimizer = torch_optimizer(named, optimization)
    bucket = {"reduce_bucket_size": bucket_elements(sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trainable))}
    config = {**settings, "zero_optimization": {**bucket, **settings["zero_optimization"]}}
    with _zero_in_every_stage():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, optimizer=optimizer, config=config)
    return engine


@contextlib.contextmanager
def _zero_in_every_stage() -> Iterator[None]:
    """Keep ZeRO in every stage: for Stage1 in BF16 with gradients summed in FP32 DeepSpeed would take its BF16_Optimizer in place of ZeRO's, whose state lies where
    zero_access doesn't look. ZeRO's own sums in FP32, too: it does so for FP16."""
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine

    real = DeepSpeedEngine._do_optimizer_sanity_check

    def chosen(engine: Any, optimizer: Any) -> Any:
        choice = real(engine, optimizer)
        return ZERO_OPTIMIZATION if choice == BFLOAT16 else choice

    with replaced(DeepSpeedEngine, "_do_optimizer_sanity_check", chosen):
        yield
