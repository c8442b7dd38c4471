"""Conditions for training a mixture-of-experts model over several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lockstep_spec.choices import Quantization, ZeroStage
from lockstep_train.base.errors import ConfigError

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
                f"training.model.quantization is {quantization.value}, but bitsandbytes packs linear layers only, and {name} of this model, which holds "
                "most of its weights, is none; leave quantization out, and use Stage3 if memory is short"
            )
        if used == "grouped_mm":
            check_rows(name, experts)


def check_rows(name: str, experts: torch.nn.Module) -> None:
    """Raise ConfigError when grouped_mm can't take a stack of weights: its rows must be whole blocks of 16 bytes."""
    for parameter_name, parameter in experts.named_parameters(recurse=False):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        row_bytes = shape[-1] * parameter.element_size()
        if len(shape) == 3 and row_bytes % ROW_BYTES:
            raise ConfigError(
                f"{name}.{parameter_name} of this model has rows of {row_bytes} bytes, but grouped_mm needs a multiple of {ROW_BYTES}; "
                "use Stage2 with experts_implementation batched_mm in the model's config.json, or a model of another width"
            )
