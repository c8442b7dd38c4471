"""From a wrapped model to a DeepSpeed engine."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

from lockstep_sizes.choices import Offload, Precision
from lockstep_sizes.choices import Optimizer as OptimizerName
from lockstep_sizes.memory import bucket_elements
from lockstep_train.config import OptimizationConfig
from lockstep_train.data.pool import usable_cores
from lockstep_train.errors import ConfigError
from lockstep_train.imports import import_engine


def prepare_deepspeed() -> Any:
    """DeepSpeed over the joined process group, without its compiled operators. Before a model is loaded.

    On CPU it would compile a shared-memory all-reduce (31 s, needs g++ and ninja), which only tensor-parallel inference
    calls: training's collectives go through the process group. So it is marked as not available; pods need no compiler.
    """
    deepspeed = import_engine()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    return deepspeed


def torch_optimizer(parameters: Sequence[torch.nn.Parameter], optimization: OptimizationConfig) -> torch.optim.Optimizer:
    """torch's own: no operator to compile, on a GPU or, with offload, on the CPU, where the fused form uses its vector units."""
    kind = torch.optim.AdamW if optimization.optimizer is OptimizerName.ADAMW else torch.optim.Adam
    fused = True if optimization.offload is Offload.CPU else None
    return kind(parameters, lr=optimization.learning_rate, weight_decay=optimization.weight_decay, fused=fused)


def share_cores(optimization: OptimizationConfig, ranks_per_node: int) -> None:
    """With offload the update runs on CPUs: by this rank's part of the cores, unless the user has set OMP_NUM_THREADS. What the agent sets,
    one thread a rank, is for ranks that compute on GPUs, or on as many cores as there are ranks."""
    ours = (None, os.environ.get("LOCKSTEP_DEFAULT_THREADS"))
    if optimization.offload is Offload.CPU and os.environ.get("OMP_NUM_THREADS") in ours:
        torch.set_num_threads(max(1, usable_cores() // ranks_per_node))


def precision_note(precision: Precision, device: torch.device) -> str | None:
    """What to say of a precision that works here but is slow: without instructions for it, BF16 took 8 times as long as FP32."""
    if precision is not Precision.BF16 or device.type != "cpu" or platform.machine() != "x86_64":
        return None
    if torch.cpu._is_avx512_bf16_supported():
        return None
    return "This CPU has no instructions for BF16 and computes it slowly; training.precision: FP32 may be several times faster"


def recompute_activations(base: Any) -> None:
    """Gradient checkpointing. Non-reentrant: the other kind loses gradients where a layer's input needs none, as on a frozen base."""
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def refuse_invalid(settings: dict[str, Any]) -> None:
    """Raises ConfigError for what DeepSpeed refuses, before minutes go into loading a model."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.precision_config import get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config
    from pydantic import ValidationError

    try:
        get_zero_config(settings)
        get_float16_config(settings)
    except ValidationError as error:
        raise ConfigError(f"training.deepspeed: DeepSpeed refuses it: {' '.join(str(error).split())}") from error
    if settings["fp16"]["enabled"] and not get_accelerator().is_fp16_supported():
        raise ConfigError("training.precision is FP16, which this device can't compute in; BF16 and FP32 can be used")


def start_engine(model: torch.nn.Module, optimization: OptimizationConfig, settings: dict[str, Any]) -> Any:
    """A DeepSpeed engine over the model's trainable parameters."""
    deepspeed = prepare_deepspeed()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch_optimizer(trainable, optimization)
    bucket = {"reduce_bucket_size": bucket_elements(sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trainable))}
    config = {**settings, "zero_optimization": {**bucket, **settings["zero_optimization"]}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, optimizer=optimizer, config=config)
    return engine
