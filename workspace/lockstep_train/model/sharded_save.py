"""Hooks that let autograd keep a sharded weight as the parameter that it is, never as the storage that it was gathered into.

Under Stage3 a weight is whole only while its module computes. What autograd keeps of it for the backward pass must therefore be the parameter, which
DeepSpeed gathers again by then. A view of it (transformers' grouped_mm keeps each stack of experts transposed) would keep the whole weight alive from
the forward to the backward pass, on every rank and for every layer: 199 GB of GLM-4.5-Air's experts. Gradient checkpointing keeps nothing
of a layer and has hooks of its own here, which these would hide; so they are for training without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lockstep_train.model.moe import experts_modules


@dataclass(frozen=True)
class ParameterView:
    """Place of a saved tensor within a parameter, whole or not at the moment."""

    parameter: torch.nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    """Offset from the parameter's own first element: the buffer that it is gathered into is another one each time."""


def save_sharded(model: torch.nn.Module) -> None:
    """Let each module that holds stacks of experts keep its weights as parameters. Before DeepSpeed adds its hooks, which must stay outside."""
    for _, module in experts_modules(model):
        if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):
            module.forward = _keeping_views(module.forward)


def _keeping_views(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def keeping(*arguments: Any, **options: Any) -> Any:
        with saved_tensors_hooks(as_view, from_view):
            return forward(*arguments, **options)

    return keeping


def as_view(tensor: torch.Tensor) -> torch.Tensor | ParameterView:
    """Return what to keep of `tensor`: itself, unless it is a view of a sharded parameter."""
    base = tensor._base
    if not isinstance(base, torch.nn.Parameter) or not hasattr(base, "ds_id"):
        return tensor
    return ParameterView(base, tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset())


def from_view(saved: torch.Tensor | ParameterView) -> torch.Tensor:
    """Return the tensor again. Raises RuntimeError for a parameter that nothing has gathered for the backward pass."""
    if isinstance(saved, torch.Tensor):
        return saved
    whole = saved.parameter.detach()
    if whole.numel() != saved.parameter.ds_numel:  # type: ignore[attr-defined]
        shape = tuple(saved.parameter.ds_shape)  # type: ignore[attr-defined]
        raise RuntimeError(
            f"a weight of shape {shape} is not gathered in the backward pass; set training.optimization.gradientCheckpointing to true"
        )
    return whole.as_strided(saved.size, saved.stride, whole.storage_offset() + saved.offset)
