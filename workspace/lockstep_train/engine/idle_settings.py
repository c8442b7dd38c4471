"""Raw settings that DeepSpeed reads past, or acts on nowhere in a run of Lockstep's (deepspeed 0.19.8, pinned): a person who wrote one expects something of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep_spec.choices import ZeroStage
from lockstep_train.base.errors import ConfigError

IDLE = {
    "activation_checkpointing": "only a model that calls deepspeed.checkpointing reads it (what you want is training.optimization.gradientCheckpointing)",
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
    "save_muon_momentum_buffer_in_memory": "training.optimization.optimizer is never Muon",
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
        "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "round_robin_gradients", "parameter_alignment",
        "compute_grad_norm",
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
