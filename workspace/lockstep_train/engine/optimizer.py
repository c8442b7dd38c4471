"""The optimizer over a model's trainable parameters, and its learning rate: a pure function of the step, so a resumed run needs no
scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from lockstep_spec import length
from lockstep_spec.choices import Offload, Schedule
from lockstep_spec.training import OptimizationConfig
from lockstep_train.zero.parameters import full_shape

Named = tuple[str, torch.nn.Parameter]


def torch_optimizer(parameters: Iterable[Named], optimization: OptimizationConfig) -> torch.optim.Optimizer:
    """Return torch's own AdamW: no operator to compile, on a GPU or, with offload, on the CPU, where the fused form uses its vector
    units.

    Its rate is the full one until `Steps` sets that of a step.
    """
    return torch.optim.AdamW(
        decay_groups(parameters, optimization.weight_decay),
        lr=optimization.learning_rate,
        betas=(optimization.beta1, optimization.beta2),
        eps=optimization.epsilon,
        fused=True if optimization.offload is Offload.CPU else None,
    )


def decay_groups(parameters: Iterable[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of torch's optimizers: matrices decay; norms, biases and other vectors don't. None of them is empty.

    Without weight decay all are in one group: each group has flat buffers of its own.
    """
    named = list(parameters)
    if weight_decay == 0:
        return [{"params": [parameter for _, parameter in named], "weight_decay": 0.0}]
    decaying = [parameter for name, parameter in named if decays(name, parameter)]
    others = [parameter for name, parameter in named if not decays(name, parameter)]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def decays(name: str, parameter: torch.nn.Parameter) -> bool:
    """Return True if weight decay applies. Stacks of experts have their biases as a matrix, so the name counts, too."""
    dimensions = len(full_shape(parameter))
    return dimensions > 1 and not name.rsplit(".", 1)[-1].endswith("bias")


def learning_rate(optimization: OptimizationConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 1): linear warm-up to the full rate, then the schedule, which reaches its end after the last
    step.

    Cosine and Linear end at `min_learning_rate_ratio` of the full rate.
    """
    full, warmup = optimization.learning_rate, length.warmup_steps(optimization.warmup_steps, total_steps)
    if step <= warmup:
        return full * step / warmup
    progress = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    least = full * optimization.min_learning_rate_ratio
    if optimization.schedule is Schedule.COSINE:
        return least + (full - least) * 0.5 * (1 + math.cos(math.pi * progress))
    if optimization.schedule is Schedule.LINEAR:
        return least + (full - least) * (1 - progress)
    return full
