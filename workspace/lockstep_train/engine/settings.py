"""DeepSpeed's configuration from ours (pure), and the user's raw settings laid over it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_spec.choices import Method, Offload, Precision, ZeroStage
from lockstep_spec.gathering import ahead_elements, live_elements
from lockstep_spec.shape import ModelShape
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.engine.idle_settings import STAGE3, refuse_idle
from lockstep_train.engine.raw_values import refuse_unusable_values

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
    "aio", "communication_data_type", "data_types", "disable_python_gc", "dump_state", "flops_profiler", "fp16", "gradient_predivide_factor", "log_level", "memory_breakdown",
    "prescale_gradients", "steps_per_print", "wall_clock_breakdown", "zero_optimization",
)  # fmt: skip
"""Top-level settings that are DeepSpeed's own business. What is in neither list would replace a part of Lockstep's trainer
(curriculum_learning, elasticity, pipeline, …) or is unknown to DeepSpeed, which reads past unknown ones silently."""


def deepspeed_settings(training: TrainingConfig, accumulation: int, partition: int = 1, shape: ModelShape | None = None) -> dict[str, Any]:
    """Settings that we decide, with the raw settings laid over them; the learning rate is set by us before every step, so DeepSpeed
    gets no scheduler. `partition`: ranks that share a second copy of the weights (hpZ); 1: there is none. `shape`: the model's, where known.

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
            "overlap_comm": _overlaps(training),
            "contiguous_gradients": True,
            "stage3_gather_16bit_weights_on_model_save": False,  # the gather is the 30-minute time-out people know
        },
        # In BF16 a sum of 512 micro-batches' gradients is 2 % further off than in FP32.
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1_000_000_000,
    }
    if training.zero_stage is ZeroStage.STAGE3 and shape is not None:
        settings["zero_optimization"]["stage3_max_live_parameters"] = live_elements(shape)
        settings["zero_optimization"]["stage3_prefetch_bucket_size"] = ahead_elements(shape)
    if training.optimization.offload is Offload.CPU:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        settings["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own must be compiled; torch's runs on the CPU as well
    raw = training.deepspeed or {}
    refuse_contradictions(raw, training)
    return overlaid(settings, with_full_names(raw))


def _overlaps(training: TrainingConfig) -> bool:
    """Return True where overlapping pays. Under Stage3 it gives gathers of weights a stream of their own beside the computing, and with method Full it reduces gradients beside the
    backward pass. An adapter's few gradients under Stage1 and Stage2 gain nothing by it, and their bucket would be there twice."""
    return training.zero_stage is ZeroStage.STAGE3 or training.method is Method.FULL


def refuse_contradictions(raw: Mapping[str, Any], training: TrainingConfig) -> None:
    """Raise ConfigError naming the first raw setting that would do nothing, that Lockstep decides itself, that it doesn't know, or that can't work."""
    refuse_idle(raw, training.zero_stage)
    for key in raw:
        if key not in PASSED_ON and key not in OWNED:
            near = difflib.get_close_matches(key, [*PASSED_ON, *OWNED], n=1)
            raise ConfigError(
                f"training.deepspeed.{key} is not a DeepSpeed setting that can be used here"
                + (f" (did you mean {near[0]}?)" if near else "")
                + f"; valid here: {', '.join(PASSED_ON)}"
            )
    for path in _paths(raw):
        if path in OWNED:
            raise ConfigError(f"training.deepspeed.{path} contradicts {OWNED[path]}, which decides it; set that one instead")
    refuse_unusable_values(raw, training.zero_stage)
    _refuse_data_types(raw.get("data_types", {}), training.precision)
    if "fp16" in raw and training.precision is not Precision.FP16:
        raise ConfigError(f"training.deepspeed.fp16 is only read with training.precision FP16, which is {training.precision.value}")


def _refuse_data_types(chosen: Any, precision: Precision) -> None:
    """Refuse sums of gradients in other formats than FP32 and the one that they have."""
    valid = sorted({"fp32", precision.value.lower()})
    value = chosen.get("grad_accum_dtype") if isinstance(chosen, Mapping) else None
    if chosen != {} and (not isinstance(chosen, Mapping) or set(chosen) != {"grad_accum_dtype"} or value not in valid):
        raise ConfigError(
            f"training.deepspeed.data_types is {json.dumps(chosen)}, but must be an object with grad_accum_dtype alone, the format in which gradients "
            f"are summed, which with training.precision {precision.value} is {' or '.join(valid)}"
        )


def with_full_names(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`raw` with the prefix stage3_ before the settings of zero_optimization that DeepSpeed takes under either name: under both it fails, and ours have it.

    Raises ConfigError for a setting that stands there twice.
    """
    zero = raw.get("zero_optimization", {})
    twice = [name for name in STAGE3 if name in zero and f"stage3_{name}" in zero]
    if twice:
        raise ConfigError(
            f"training.deepspeed.zero_optimization has {twice[0]} and stage3_{twice[0]}, which are one setting; keep one of them"
        )
    full = {f"stage3_{name}" if name in STAGE3 else name: value for name, value in zero.items()}
    return {**raw, "zero_optimization": full} if full else raw


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
