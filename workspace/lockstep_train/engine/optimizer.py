"""The optimizer over a model's trainable parameters: what decays and what doesn't."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lockstep_spec.choices import Offload
from lockstep_spec.choices import Optimizer as OptimizerName
from lockstep_train.base.config import OptimizationConfig

Named = tuple[str, torch.nn.Parameter]


def torch_optimizer(parameters: Iterable[Named], optimization: OptimizationConfig) -> torch.optim.Optimizer:
    """torch's own: no operator to compile, on a GPU or, with offload, on the CPU, where the fused form uses its vector units."""
    kind = torch.optim.AdamW if optimization.optimizer is OptimizerName.ADAMW else torch.optim.Adam
    return kind(
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
    """Whether weight decay applies. Stacks of experts have their biases as a matrix, so the name counts, too."""
    dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
    return dimensions > 1 and not name.rsplit(".", 1)[-1].endswith("bias")
