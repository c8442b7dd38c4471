"""The learning rate as a pure function of the step, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from lockstep_spec import length
from lockstep_spec.choices import Schedule
from lockstep_train.base.config import OptimizationConfig


def learning_rate(optimization: OptimizationConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 1): linear warm-up to the full rate, then the schedule, which reaches its end after the last step.

    Cosine and Linear end at `min_learning_rate_ratio` of the full rate.
    """
    full, warmup = optimization.learning_rate, warmup_steps(optimization, total_steps)
    if step <= warmup:
        return full * step / warmup
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    least = full * optimization.min_learning_rate_ratio
    if optimization.schedule is Schedule.COSINE:
        return least + (full - least) * 0.5 * (1 + math.cos(math.pi * progress))
    if optimization.schedule is Schedule.LINEAR:
        return least + (full - least) * (1 - progress)
    return full


def warmup_steps(optimization: OptimizationConfig, total_steps: int) -> int:
    """Steps of the warm-up, however it is stated."""
    return length.warmup_steps(optimization.warmup_steps, optimization.warmup_ratio, total_steps)
