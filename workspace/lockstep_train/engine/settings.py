"""DeepSpeed's configuration from ours (pure), and the user's raw settings laid over it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_sizes.choices import Offload, Precision
from lockstep_train.config import TrainingConfig
from lockstep_train.errors import ConfigError

OWNED = {
    "train_batch_size": "training.optimization.globalBatchSize",
    "train_micro_batch_size_per_gpu": "training.optimization.microBatchSize",
    "gradient_accumulation_steps": "training.optimization.globalBatchSize",
    "managed_gradient_accumulation": "training.optimization.globalBatchSize",
    "gradient_clipping": "training.optimization.maxGradientNorm",
    "optimizer": "training.optimization.optimizer",
    "scheduler": "training.optimization.schedule",
    "fp16.enabled": "training.precision",
    "fp16.auto_cast": "training.precision",
    "fp16.fp16_master_weights_and_grads": "training.precision",
    "bf16": "training.precision",
    "bfloat16": "training.precision",
    "amp": "training.precision",
    "torch_autocast": "training.precision",
    "data_types": "training.precision",
    "zero_allow_untested_optimizer": "training.optimization.optimizer",
    "zero_force_ds_cpu_optimizer": "training.optimization.offload",
    "zero_optimization.stage": "training.zeroStage",
    "zero_optimization.offload_optimizer": "training.optimization.offload",
    "zero_optimization.cpu_offload": "training.optimization.offload",
    "zero_optimization.zero_hpz_partition_size": "training.hierarchicalPartition",
    "zero_optimization.mics_shard_size": "training.hierarchicalPartition",
    "checkpoint": "training.checkpoint",
    "tensorboard": "training.metrics",
    "wandb": "training.metrics",
    "comet": "training.metrics",
    "csv_monitor": "training.metrics",
}
"""DeepSpeed's settings that a field of ours decides."""

PASSED_ON = (
    "activation_checkpointing", "aio", "comms_logger", "communication_data_type", "compile", "disable_allgather",
    "disable_python_gc", "dump_state", "flops_profiler", "fp16", "gradient_predivide_factor", "log_level", "memory_breakdown",
    "prescale_gradients", "sparse_gradients", "steps_per_print", "wall_clock_breakdown", "zero_optimization",
)  # fmt: skip
"""Top-level settings that are DeepSpeed's own business. What is in neither list would replace a part of Lockstep's trainer
(curriculum_learning, elasticity, pipeline, …) or is unknown to DeepSpeed, which reads past unknown ones silently."""


def deepspeed_settings(training: TrainingConfig, accumulation: int, partition: int = 1) -> dict[str, Any]:
    """Only what we decide, with the raw settings laid over it; the learning rate is set by us before every step, so DeepSpeed
    gets no scheduler. `partition`: ranks that share a second copy of the weights (hpZ); 1: there is none.

    Raises ConfigError for a raw setting that contradicts a field of ours or that DeepSpeed would not read.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.optimization.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": training.optimization.max_gradient_norm,
        # Stage1 and Stage2 apply a gradient that isn't finite in BF16 unless they are told to look.
        "bf16": {"enabled": training.precision is Precision.BF16, "check_grad_overflow": training.precision is Precision.BF16},
        "fp16": {"enabled": training.precision is Precision.FP16},
        "zero_optimization": {
            "stage": training.zero_stage.number,
            "zero_hpz_partition_size": partition,
            "overlap_comm": False,  # gains nothing for an adapter's few gradients, and has reduced wrong values before
            "contiguous_gradients": True,
            "stage3_gather_16bit_weights_on_model_save": False,  # the gather is the 30-minute time-out people know
        },
        "steps_per_print": 1_000_000_000,
    }
    if training.optimization.offload is Offload.CPU:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        settings["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own must be compiled; torch's runs on the CPU as well
    raw = training.deepspeed or {}
    refuse_contradictions(raw, training)
    return overlaid(settings, raw)


def refuse_contradictions(raw: Mapping[str, Any], training: TrainingConfig) -> None:
    """Raises ConfigError naming the first raw setting that Lockstep decides itself or doesn't know."""
    for key in raw:
        if key not in PASSED_ON and key not in OWNED:
            near = difflib.get_close_matches(key, [*PASSED_ON, *OWNED], n=1)
            raise ConfigError(
                f"training.deepspeed.{key} is no setting of DeepSpeed that can be used here"
                + (f" (did you mean {near[0]}?)" if near else "")
                + f"; valid here: {', '.join(PASSED_ON)}"
            )
    for path in _paths(raw):
        if path in OWNED:
            raise ConfigError(f"training.deepspeed.{path} contradicts {OWNED[path]}, which decides it; set that one instead")
    if "fp16" in raw and training.precision is not Precision.FP16:
        raise ConfigError(f"training.deepspeed.fp16 is only read with training.precision FP16, which is {training.precision.value}")


def _paths(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in raw.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def overlaid(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `raw` laid over them, section by section."""
    result = dict(settings)
    for key, value in raw.items():
        under = result.get(key)
        result[key] = overlaid(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return result
