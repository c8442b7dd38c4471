"""DeepSpeed's configuration from ours (pure), and the user's raw settings laid over it (deepspeed 0.19.8, pinned).

Refused are raw settings that DeepSpeed reads past, or acts on nowhere in a run of Lockstep's, since a person who wrote one expects
something of it; and values that it can't work with: it would say so only once the model is loaded, and the same at every attempt.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lockstep_spec.choices import Method, Offload, Precision, ZeroStage
from lockstep_spec.memory import ahead_elements, live_elements
from lockstep_spec.shape import ModelShape
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError

OWNED = {
    setting: f"training.{field}"
    for field, settings in {
        "optimization.globalBatchSize": ("train_batch_size", "gradient_accumulation_steps", "managed_gradient_accumulation"),
        "optimization.microBatchSize": ("train_micro_batch_size_per_gpu",),
        "optimization.maxGradientNorm": ("gradient_clipping",),
        "optimization": ("optimizer", "zero_allow_untested_optimizer"),
        "optimization.schedule": ("scheduler",),
        "optimization.offload": ("zero_force_ds_cpu_optimizer", "zero_optimization.offload_optimizer", "zero_optimization.cpu_offload"),
        "precision": (
            "fp16.enabled", "fp16.auto_cast", "fp16.fp16_master_weights_and_grads", "bf16", "bfloat16", "amp", "torch_autocast",
        ),
        "zeroStage": ("zero_optimization.stage",),
        "hierarchicalPartition": ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"),
        "checkpoint": ("checkpoint",),
        "reportTo": ("tensorboard", "wandb", "comet", "csv_monitor"),
    }.items()
    for setting in settings
}  # fmt: skip
"""DeepSpeed's settings that a field of ours decides."""

PASSED_ON = (
    "aio", "communication_data_type", "data_types", "disable_python_gc", "dump_state", "flops_profiler", "fp16",
    "gradient_predivide_factor", "log_level", "memory_breakdown", "prescale_gradients", "steps_per_print", "wall_clock_breakdown",
    "zero_optimization",
)  # fmt: skip
"""Top-level settings that are DeepSpeed's own business. What is in neither list would replace a part of Lockstep's trainer
(curriculum_learning, elasticity, pipeline, …) or is unknown to DeepSpeed, which reads past unknown ones silently."""


def deepspeed_settings(training: TrainingConfig, accumulation: int, partition: int = 1, shape: ModelShape | None = None) -> dict[str, Any]:
    """Settings that we decide, with the raw settings laid over them; the learning rate is set by us before every step, so DeepSpeed
    gets no scheduler. `partition`: ranks that share a second copy of the weights (hpZ); 1: there is none. `shape`: the model's, where
    known.

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
    raw = training.deepspeed or {}
    refuse_contradictions(raw, training)
    return overlaid(settings, with_full_names(raw))


def refuse_contradictions(raw: Mapping[str, Any], training: TrainingConfig) -> None:
    """Raise ConfigError naming the first raw setting that would do nothing, that Lockstep decides itself, that it doesn't know, or that
    can't work.
    """
    refuse_idle(raw, training.zero_stage)
    for key in raw:
        if key not in PASSED_ON and key not in OWNED:
            near = _nearest(key, [*PASSED_ON, *OWNED])
            raise ConfigError(
                f"training.deepspeed.{key} is not a DeepSpeed setting that can be used here{near}; valid here: {', '.join(PASSED_ON)}"
            )
    for path in _paths(raw):
        if path in OWNED:
            raise ConfigError(f"training.deepspeed.{path} contradicts {OWNED[path]}, which decides it; set that one instead")
    refuse_unusable_values(raw, training.zero_stage)
    _refuse_data_types(raw.get("data_types", {}), training.precision)
    if "fp16" in raw and training.precision is not Precision.FP16:
        raise ConfigError(f"training.deepspeed.fp16 is only read with training.precision FP16, which is {training.precision.value}")


def _nearest(name: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _refuse_data_types(chosen: Any, precision: Precision) -> None:
    """Refuse sums of gradients in other formats than FP32 and the one that they have."""
    valid = sorted({"fp32", precision.value.lower()})
    value = chosen.get("grad_accum_dtype") if isinstance(chosen, Mapping) else None
    if chosen != {} and (not isinstance(chosen, Mapping) or set(chosen) != {"grad_accum_dtype"} or value not in valid):
        raise ConfigError(
            f"training.deepspeed.data_types is {json.dumps(chosen)}, but must be an object with grad_accum_dtype alone, the format in which"
            f" gradients are summed, which with training.precision {precision.value} is {' or '.join(valid)}"
        )


def with_full_names(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`raw` with the prefix stage3_ before the settings of zero_optimization that DeepSpeed takes under either name: under both it fails,
    and ours have it.

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


IDLE = {
    "activation_checkpointing": (
        "only a model that calls deepspeed.checkpointing reads it (what you want is training.optimization.recompute)"
    ),
    "compile": "DeepSpeed compiles where engine.compile() is called, which Lockstep's trainer doesn't do",
    "disable_allgather": "DeepSpeed never reads it",
    "sparse_gradients": "ZeRO reduces all gradients dense",
    "comms_logger": "its summary is never printed; logs and metrics show what each step waited for the network",
}
"""Top-level sections, and why they do nothing."""
_NO_CHECKPOINT = "checkpoints are Lockstep's own, and DeepSpeed neither saves nor loads any"
IDLE_ZERO = {
    "allgather_partitions": "DeepSpeed never reads it",
    "load_from_fp32_weights": _NO_CHECKPOINT,
    "elastic_checkpoint": _NO_CHECKPOINT,
    "pipeline_loading_checkpoint": _NO_CHECKPOINT,
    "gather_16bit_weights_on_model_save": _NO_CHECKPOINT,
    "stage3_gather_16bit_weights_on_model_save": _NO_CHECKPOINT,
    "stage3_gather_fp16_weights_on_model_save": _NO_CHECKPOINT,
    "cpu_offload_use_pin_memory": "DeepSpeed never reads it; training.optimization.offload CPU uses pinned memory anyway",
    "legacy_stage1": "DeepSpeed no longer has such a stage",
    "save_muon_momentum_buffer_in_memory": "the optimizer is AdamW, never Muon",
}
"""Settings of zero_optimization in every stage."""
STAGE3 = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
    "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
"""Settings with the prefix stage3_ or without."""
ONLY_STAGE3 = frozenset(
    {
        *STAGE3, *(f"stage3_{name}" for name in STAGE3), "offload_param", "cpu_offload_param", "sub_group_size", "zero_quantized_weights",
        "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
    }
)  # fmt: skip
NEVER_STAGE3 = frozenset(
    {
        "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "round_robin_gradients",
        "parameter_alignment", "compute_grad_norm",
    }
)  # fmt: skip
"""Settings of zero_optimization that act in some stages."""


def refuse_idle(raw: Mapping[str, Any], stage: ZeroStage) -> None:
    """Raise ConfigError naming the first raw setting that would do nothing in this run, and why."""
    for key in raw:
        if key in IDLE:
            raise _idle(key, IDLE[key])
    zero = raw.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    for key in zero:
        if key in IDLE_ZERO:
            raise _idle(f"zero_optimization.{key}", IDLE_ZERO[key])
        if key in (ONLY_STAGE3 if stage is not ZeroStage.STAGE3 else NEVER_STAGE3):
            acting = "Stage3" if stage is not ZeroStage.STAGE3 else "Stage1 and Stage2"
            raise _idle(f"zero_optimization.{key}", f"it acts in {acting} only, and training.zeroStage is {stage.value}")
    level = str(raw.get("log_level")).lower()
    for key in ("steps_per_print", "dump_state"):
        if raw.get(key) and level not in {"info", "debug"}:
            raise _idle(key, "DeepSpeed prints it at log_level info or debug only")
    profiler = raw.get("flops_profiler")
    if isinstance(profiler, Mapping) and "enabled" not in profiler:
        raise _idle("flops_profiler", "it lacks enabled: true")
    parameters = zero.get("offload_param")
    if "aio" in raw and not (isinstance(parameters, Mapping) and parameters.get("device") == "nvme"):
        raise _idle("aio", "nothing is offloaded to NVMe")


def _idle(path: str, why: str) -> ConfigError:
    return ConfigError(f"training.deepspeed.{path} would do nothing here: {why}; leave it out")


LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
COMMUNICATION_TYPES = ("fp32", "fp16", "bf16")
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "flops_profiler": ("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file"),
    "aio": ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"),
}
"""Sections that DeepSpeed reads name by name, past those that it doesn't know. Of the others it refuses unknown names itself."""


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_VALID: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("disable_python_gc", "dump_state", "memory_breakdown", "prescale_gradients", "wall_clock_breakdown"), (_is_flag, "true or false")
    ),
    **dict.fromkeys(("aio", "flops_profiler", "fp16", "zero_optimization"), (_is_section, "an object")),
    "communication_data_type": (
        lambda value: value is None or str(value).lower() in COMMUNICATION_TYPES,
        f"one of {', '.join(COMMUNICATION_TYPES)}, or null",
    ),
    "gradient_predivide_factor": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "log_level": (lambda value: value is None or str(value).lower() in LOG_LEVELS, f"one of {', '.join(LOG_LEVELS)}, or null"),
    "steps_per_print": (lambda value: _is_number(value) and value >= 1 and float(value).is_integer(), "a whole number from 1 on"),
}


def refuse_unusable_values(raw: Mapping[str, Any], stage: ZeroStage) -> None:
    """Raise ConfigError naming the first raw setting that DeepSpeed would fail on, and what is valid."""
    for key, value in raw.items():
        usable, valid = _VALID.get(key, (None, ""))
        if usable is not None and not usable(value):
            raise ConfigError(f"training.deepspeed.{key} is {json.dumps(value)}, but must be {valid}")
        if key in SECTIONS:
            _refuse_unknown_names(key, value)
    zero = raw.get("zero_optimization", {})
    if zero.get("zenflow") is not None:
        raise ConfigError(
            "training.deepspeed.zero_optimization.zenflow would replace AdamW with an optimizer whose state Lockstep could not"
            " save; leave it out"
        )
    scattered = stage is not ZeroStage.STAGE1 and zero.get("reduce_scatter", True) is not False
    for key, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if scattered and raw.get(key, default) != default:
            raise ConfigError(
                f"training.deepspeed.{key} can't be used with training.zeroStage {stage.value}, where gradients are reduced and scattered"
                " in one; leave it out, or set zero_optimization.reduce_scatter to false"
            )


def _refuse_unknown_names(section: str, value: Mapping[str, Any]) -> None:
    for name in value:
        if name not in SECTIONS[section]:
            near = _nearest(name, SECTIONS[section])
            raise ConfigError(
                f"training.deepspeed.{section}.{name} is not a DeepSpeed setting{near}; valid here: {', '.join(SECTIONS[section])}"
            )
