"""Length of a run: its steps, and the micro-batches of each."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """Progress of the run when this attempt began."""

    steps: int = 0
    samples: int = 0
    """Not always steps × globalBatchSize: the last step of a run that is now made longer may have been a short one."""


@dataclass(frozen=True)
class Plan:
    """The length of the run and of a step."""

    global_batch_size: int
    accumulation: int
    """Micro-batches a rank computes for one optimizer step."""
    total_samples: int
    total_steps: int
    done: Done

    def cursor(self, step: int) -> int:
        """Samples consumed before `step` (from 1)."""
        return min(self.total_samples, self.done.samples + (step - 1 - self.done.steps) * self.global_batch_size)


def plan(
    *, count: int, epochs: int, max_steps: int | None, global_batch_size: int, world_size: int, micro: int, done: Done = Done()
) -> Plan:
    """`count` is the number of training examples. Any rank count is legal: what is missing is filled with ghosts."""
    total_samples = count * epochs
    if max_steps is not None:
        total_samples = min(total_samples, done.samples + max(0, max_steps - done.steps) * global_batch_size)
    return Plan(
        global_batch_size=global_batch_size,
        accumulation=-(-global_batch_size // (micro * world_size)),
        total_samples=total_samples,
        total_steps=done.steps + max(0, -(-(total_samples - done.samples) // global_batch_size)),
        done=done,
    )


def warmup_steps(stated: float, total_steps: int) -> int:
    """Return the steps of the warm-up: so many, or below 1 that part of all steps, rounded up as transformers does."""
    return int(stated) if stated >= 1 else math.ceil(stated * total_steps)
