"""Values of raw settings that DeepSpeed can't work with (deepspeed 0.19.8, pinned): it would say so only once the model is loaded, and the same at every attempt."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

from lockstep_spec.choices import ZeroStage
from lockstep_train.base.errors import ConfigError

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
            "training.deepspeed.zero_optimization.zenflow would replace training.optimization.optimizer with an optimizer whose state Lockstep "
            "could not save; leave it out"
        )
    scattered = stage is not ZeroStage.STAGE1 and zero.get("reduce_scatter", True) is not False
    for key, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if scattered and raw.get(key, default) != default:
            raise ConfigError(
                f"training.deepspeed.{key} can't be used with training.zeroStage {stage.value}, where gradients are reduced and scattered in one; leave it "
                "out, or set zero_optimization.reduce_scatter to false"
            )


def _refuse_unknown_names(section: str, value: Mapping[str, Any]) -> None:
    for name in value:
        if name not in SECTIONS[section]:
            near = difflib.get_close_matches(name, SECTIONS[section], n=1)
            raise ConfigError(
                f"training.deepspeed.{section}.{name} is not a DeepSpeed setting"
                + (f" (did you mean {near[0]}?)" if near else "")
                + f"; valid here: {', '.join(SECTIONS[section])}"
            )
