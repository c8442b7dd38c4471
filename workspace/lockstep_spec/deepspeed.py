"""Rules of DeepSpeed's raw settings (training.deepspeed; deepspeed 0.19.8, pinned), asked by who submits a job and by its ranks.

Refused are raw settings that DeepSpeed reads past, or acts on nowhere in a run of Lockstep's, since a person who wrote one expects
something of it; and values that it can't work with: it would say so only once the model is loaded, and the same at every attempt.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lockstep_spec.choices import Precision, ZeroStage

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


def without_auto(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is "auto", by which transformers means "as the trainer has it", and sections in which nothing else is stated."""
    stated = {key: without_auto(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    return {key: value for key, value in stated.items() if value != "auto" and not (value == {} and raw[key])}


def refusals(settings: Mapping[str, Any] | None, stage: ZeroStage, precision: Precision) -> dict[str, str]:
    """Each raw setting that would do nothing, that Lockstep decides itself, that it doesn't know, or that can't work, and why."""
    problems: dict[str, str] = {}
    for path, problem in _refused(without_auto(settings or {}), stage, precision):
        problems.setdefault(path, problem)
    return problems


Refusals = Iterator[tuple[str, str]]


def _refused(raw: Mapping[str, Any], stage: ZeroStage, precision: Precision) -> Refusals:
    for path, why in _idle(raw, stage):
        yield path, f"would do nothing here: {why}; leave it out"
    for key in raw:
        if key not in PASSED_ON and key not in OWNED and key not in IDLE:
            near = _nearest(key, [*PASSED_ON, *OWNED])
            yield key, f"is not a DeepSpeed setting that can be used here{near}; valid here: {', '.join(PASSED_ON)}"
    for path in _paths(raw):
        if path in OWNED:
            yield path, f"contradicts {OWNED[path]}, which decides it; set that one instead"
    yield from _unusable(raw, stage)
    yield from _data_types(raw.get("data_types", {}), precision)
    if "fp16" in raw and precision is not Precision.FP16 and not any(path in OWNED for path in _paths({"fp16": raw["fp16"]})):
        yield "fp16", f"is only read with training.precision FP16, which is {precision.value}"


def _nearest(name: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _data_types(chosen: Any, precision: Precision) -> Refusals:
    """Refuse sums of gradients in other formats than FP32 and the one that they have."""
    valid = sorted({"fp32", precision.value.lower()})
    value = chosen.get("grad_accum_dtype") if isinstance(chosen, Mapping) else None
    if chosen != {} and (not isinstance(chosen, Mapping) or set(chosen) != {"grad_accum_dtype"} or value not in valid):
        words = f"with training.precision {precision.value} is {' or '.join(valid)}"
        stated = json.dumps(chosen, default=str)
        yield "data_types", f"is {stated}, but must be an object with grad_accum_dtype alone, the format of summed gradients, which {words}"


def _paths(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in raw.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


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


def _idle(raw: Mapping[str, Any], stage: ZeroStage) -> Refusals:
    """Yield the raw settings that would do nothing in this run, and why."""
    yield from ((key, IDLE[key]) for key in raw if key in IDLE)
    zero = _section(raw, "zero_optimization")
    for key in zero:
        if key in IDLE_ZERO:
            yield f"zero_optimization.{key}", IDLE_ZERO[key]
        if key in (ONLY_STAGE3 if stage is not ZeroStage.STAGE3 else NEVER_STAGE3):
            acting = "Stage3" if stage is not ZeroStage.STAGE3 else "Stage1 and Stage2"
            yield f"zero_optimization.{key}", f"it acts in {acting} only, and training.zeroStage is {stage.value}"
    level = str(raw.get("log_level")).lower()
    for key in ("steps_per_print", "dump_state"):
        if raw.get(key) and level not in {"info", "debug"}:
            yield key, "DeepSpeed prints it at log_level info or debug only"
    if "flops_profiler" in raw and isinstance(raw["flops_profiler"], Mapping) and "enabled" not in raw["flops_profiler"]:
        yield "flops_profiler", "it lacks enabled: true"
    if "aio" in raw and _section(zero, "offload_param").get("device") != "nvme":
        yield "aio", "nothing is offloaded to NVMe"


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    return value if isinstance(value, Mapping) else {}


LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
COMMUNICATION_TYPES = ("fp32", "fp16", "bf16")
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "flops_profiler": ("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file"),
    "aio": ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"),
}
"""Sections that DeepSpeed reads name by name, past those that it doesn't know. Of the others it refuses unknown names itself."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_VALID: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("disable_python_gc", "dump_state", "memory_breakdown", "prescale_gradients", "wall_clock_breakdown"),
        (lambda value: isinstance(value, bool), "true or false"),
    ),
    **dict.fromkeys(("aio", "flops_profiler", "fp16", "zero_optimization"), (lambda value: isinstance(value, Mapping), "an object")),
    "communication_data_type": (
        lambda value: value is None or str(value).lower() in COMMUNICATION_TYPES,
        f"one of {', '.join(COMMUNICATION_TYPES)}, or null",
    ),
    "gradient_predivide_factor": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "log_level": (lambda value: value is None or str(value).lower() in LOG_LEVELS, f"one of {', '.join(LOG_LEVELS)}, or null"),
    "steps_per_print": (lambda value: _is_number(value) and value >= 1 and float(value).is_integer(), "a whole number from 1 on"),
}


def _unusable(raw: Mapping[str, Any], stage: ZeroStage) -> Refusals:
    """Yield the raw settings that DeepSpeed would fail on, and what is valid."""
    for key, value in raw.items():
        usable, valid = _VALID.get(key, (None, ""))
        if usable is not None and not usable(value):
            yield key, f"is {json.dumps(value, default=str)}, but must be {valid}"
        for name in _section(raw, key) if key in SECTIONS else ():
            if name not in SECTIONS[key]:
                near = _nearest(name, SECTIONS[key])
                yield f"{key}.{name}", f"is not a DeepSpeed setting{near}; valid here: {', '.join(SECTIONS[key])}"
    zero = _section(raw, "zero_optimization")
    for name in STAGE3:
        if name in zero and f"stage3_{name}" in zero:
            yield f"zero_optimization.{name}", f"and stage3_{name} are one setting; keep one of them"
    if zero.get("zenflow") is not None:
        yield "zero_optimization.zenflow", "would replace AdamW with an optimizer whose state Lockstep could not save; leave it out"
    scattered = stage is not ZeroStage.STAGE1 and zero.get("reduce_scatter", True) is not False
    for key, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if scattered and raw.get(key, default) != default:
            yield (
                key,
                f"can't be used with training.zeroStage {stage.value}, where gradients are reduced and scattered in one; leave it out, or"
                " set zero_optimization.reduce_scatter to false",
            )
