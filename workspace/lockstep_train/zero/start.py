"""Start of DeepSpeed: its imports, the settings that it refuses, and its engine."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import warnings
from typing import Any

import torch

from lockstep_train.base.errors import ConfigError
from lockstep_train.base.imports import hidden_packages, replaced, uncompiled

QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
"""Settings of zero_optimization by which weights are gathered, or kept, in 8 bits."""


def import_engine() -> Any:
    """Import DeepSpeed with what its `initialize` imports. Its deprecations are for its authors."""
    with warnings.catch_warnings(), hidden_packages("mlflow"):  # which its auto-tuner imports where it is there
        warnings.simplefilter("ignore")
        deepspeed = importlib.import_module("deepspeed")
        importlib.import_module("deepspeed.ops")
    import_muon()
    return deepspeed


def import_muon() -> None:
    """Import DeepSpeed's Muon optimizer, which `initialize` looks up and we never use, without torch's compiler.

    Its functions are decorated with torch.compile, and that decorator alone imports inductor: 2 s of every start and restart.
    """
    from deepspeed.runtime import compiler

    with replaced(compiler, "compile", uncompiled):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


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
    """Refuse quantized BF16 weights where DeepSpeed can't have them: before its change 8215 (2026-08) its quantizer took their bits for
    FP16, which trains on wrong values silently. Since then it takes the format to give back.
    """
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    chosen = [name for name in QUANTIZED if settings["zero_optimization"].get(name)]
    if chosen and settings["bf16"]["enabled"] and "dtype" not in inspect.signature(CUDAQuantizer.dequantize).parameters:
        version = importlib.metadata.version("deepspeed")
        raise ConfigError(
            f"training.deepspeed.zero_optimization.{chosen[0]} with training.precision BF16 computes with wrong values in DeepSpeed"
            f" {version}; leave it out, or use the image of this version of Lockstep"
        )


def initialize(model: torch.nn.Module, trainable: list[torch.nn.Parameter], optimizer: Any, settings: dict[str, Any]) -> Any:
    """Start DeepSpeed's engine, with ZeRO in every stage.

    For Stage1 in BF16 with gradients summed in FP32 DeepSpeed would take its BF16_Optimizer in place of ZeRO's, whose state lies where
    zero_access doesn't look. ZeRO's own sums in FP32, too: it does so for FP16.
    """
    deepspeed = prepare_deepspeed()
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine

    real = DeepSpeedEngine._do_optimizer_sanity_check

    def choose(engine: Any, optimizer: Any) -> Any:
        choice = real(engine, optimizer)
        return ZERO_OPTIMIZATION if choice == BFLOAT16 else choice

    with replaced(DeepSpeedEngine, "_do_optimizer_sanity_check", choose):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, optimizer=optimizer, config=settings)
    return engine
