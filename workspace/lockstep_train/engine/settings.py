"""DeepSpeed's configuration from ours (pure), and the user's raw settings laid over it (deepspeed 0.19.8, pinned)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep_spec.choices import Method, Offload, Precision, ZeroStage
from lockstep_spec.deepspeed import STAGE3, refusals, without_auto
from lockstep_spec.memory import ahead_elements, live_elements
from lockstep_spec.shape import ModelShape
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError


def deepspeed_settings(training: TrainingConfig, accumulation: int, partition: int = 1, shape: ModelShape | None = None) -> dict[str, Any]:
    """Settings that we decide, with the raw settings laid over them; the learning rate is set by us before every step, so DeepSpeed
    gets no scheduler. `partition`: ranks that share a second copy of the weights (hpZ); 1: there is none. `shape`: the model's, where
    known.

    Raises ConfigError for raw settings that are refused.
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
            # Under Stage3 gathers of weights have a stream of their own beside the computing, with method Full gradients are reduced beside
            # the backward pass. An adapter's few gradients under Stage1 and Stage2 gain nothing by it, and their bucket would be there
            # twice.
            "overlap_comm": training.zero_stage is ZeroStage.STAGE3 or training.method is Method.FULL,
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
    problems = refusals(training.deepspeed, training.zero_stage, training.precision)
    if problems:
        raise ConfigError("; ".join(f"training.deepspeed.{path} {problem}" for path, problem in problems.items()))
    return overlaid(settings, with_full_names(without_auto(training.deepspeed or {})))


def with_full_names(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`raw` with the prefix stage3_ before the settings of zero_optimization that DeepSpeed takes under either name: under both it fails,
    and ours have it.
    """
    full = {f"stage3_{name}" if name in STAGE3 else name: value for name, value in raw.get("zero_optimization", {}).items()}
    return {**raw, "zero_optimization": full} if full else raw


def overlaid(settings: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `raw` laid over them, section by section."""
    result = dict(settings)
    for key, value in raw.items():
        under = result.get(key)
        result[key] = overlaid(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return result
