"""Mixture-of-experts models under DeepSpeed: conditions for training one over several ranks, and hooks for the stacks of its experts.

The hooks let autograd keep a sharded weight as the parameter that it is, never as the storage that it was gathered into. Under Stage3 a
weight is whole only while its module computes. What autograd keeps of it for the backward pass must therefore be the parameter, which
DeepSpeed gathers again by then. A view of it (transformers' grouped_mm keeps each stack of experts transposed) would keep the whole weight
alive from the forward to the backward pass, on every rank and for every layer: 199 GB of GLM-4.5-Air's experts. Gradient checkpointing has
hooks of its own, which these would hide; so they are for layers without it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lockstep_spec.choices import Quantization, ZeroStage
from lockstep_train.base.errors import ConfigError
from lockstep_train.zero.parameters import full_shape, is_sharded

ROW_BYTES = 16
STATIC = frozenset({"grouped_mm", "batched_mm"})
STATIC_CLASSES = frozenset({"Llama4TextExperts"})
"""Experts outside of transformers' choice of implementations that compute all experts at once."""


def experts_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that hold the routed experts of a layer."""
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] == "experts" or type(module).__name__.endswith("Experts"):
            yield name, module


def implementation(experts: Any) -> str:
    """Implementation of the experts: transformers' own name of it, or `eager` where it offers no choice."""
    if type(experts).__name__ in STATIC_CLASSES:
        return "grouped_mm"
    if not hasattr(experts, "is_concatenated"):  # set by transformers where there is a choice
        return "eager"
    return str(experts.config._experts_implementation)


def check_experts(model: torch.nn.Module, stage: ZeroStage, quantization: Quantization) -> None:
    """Raise ConfigError for experts that would hang, fail in the first step, or stay as large as they were.

    Stage3 needs every rank to run the same modules in the same order, and `eager` runs those of the experts that its tokens hit.
    """
    for name, experts in experts_modules(model):
        used = implementation(experts)
        if stage is ZeroStage.STAGE3 and used not in STATIC:
            raise ConfigError(
                f"{name} of this model computes its experts with `{used}`, which hangs under Stage3 because ranks visit different experts; "
                "use zeroStage Stage2, or a model whose config.json leaves experts_implementation out so that grouped_mm is taken"
            )
        if quantization is not Quantization.NONE:
            raise ConfigError(
                f"training.model.quantization is {quantization.value}, but bitsandbytes packs linear layers only, and {name} of this model,"
                " which holds most of its weights, is none; leave quantization out, and use Stage3 if memory is short"
            )
        if used == "grouped_mm":
            check_rows(name, experts)


def check_rows(name: str, experts: torch.nn.Module) -> None:
    """Raise ConfigError when grouped_mm can't take a stack of weights: its rows must be whole blocks of 16 bytes."""
    for parameter_name, parameter in experts.named_parameters(recurse=False):
        shape = full_shape(parameter)
        row_bytes = shape[-1] * parameter.element_size()
        if len(shape) == 3 and row_bytes % ROW_BYTES:
            raise ConfigError(
                f"{name}.{parameter_name} of this model has rows of {row_bytes} bytes, but grouped_mm needs a multiple of {ROW_BYTES}; "
                "use Stage2 with experts_implementation batched_mm in the model's config.json, or a model of another width"
            )


@dataclass(frozen=True)
class ParameterView:
    """Place of a saved tensor within a parameter, whole or not at the moment."""

    parameter: torch.nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    """Offset from the parameter's own first element: the buffer that it is gathered into is another one each time."""


def save_sharded(model: torch.nn.Module) -> None:
    """Let each module within that holds stacks of experts keep its weights as parameters. Before DeepSpeed adds its hooks, which must stay
    outside.
    """
    for _, module in experts_modules(model):
        if any(is_sharded(parameter) for parameter in module.parameters(recurse=False)):
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
    if not isinstance(base, torch.nn.Parameter) or not is_sharded(base):
        return tensor
    return ParameterView(base, tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset())


def from_view(saved: torch.Tensor | ParameterView) -> torch.Tensor:
    """Return the tensor again. Raises RuntimeError for a parameter that nothing has gathered for the backward pass."""
    if isinstance(saved, torch.Tensor):
        return saved
    whole = saved.parameter.detach()
    shape = full_shape(saved.parameter)
    if whole.numel() != math.prod(shape):
        raise RuntimeError(f"a weight of shape {shape} is not gathered in the backward pass; set training.optimization.recompute to All")
    return whole.as_strided(saved.size, saved.stride, whole.storage_offset() + saved.offset)
