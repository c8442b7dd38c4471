"""The learning rate as a pure function of the step, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from lockstep_sizes.choices import Schedule
from lockstep_train.config import OptimizationConfig


def learning_rate(optimization: OptimizationConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 1): linear warm-up to the full rate, then the schedule, which reaches 0 after the last step."""
    full, warmup = optimization.learning_rate, optimization.warmup_steps
    if step <= warmup:
        return full * step / warmup
    progress = (step - 1 - warmup) / max(1, total_steps - warmup)
    if optimization.schedule is Schedule.COSINE:
        return full * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if optimization.schedule is Schedule.LINEAR:
        return full * max(0.0, 1 - progress)
    return full
