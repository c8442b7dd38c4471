"""What of a model is trained: an adapter beside its frozen weights, or every weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Method
from lockstep_train.base.config import TrainingConfig
from lockstep_train.model.initial import start_from_adapter
from lockstep_train.model.lora import adapter_description, adapter_names, add_lora


def make_trainable(model: torch.nn.Module, training: TrainingConfig, *, fresh: bool) -> torch.nn.Module:
    """The model with its trainable parameters, before the engine. `fresh`: no commit will be loaded, so `initFrom` counts.

    Raises ConfigError for a target or a folder that doesn't fit this model.
    """
    trainable = model.requires_grad_(True) if training.method is Method.FULL else _with_adapter(model, training, fresh)
    model.__dict__.pop("sharding", None)  # from here on, a model that transformers makes beside this one is not to be sharded
    return trainable


def _with_adapter(model: torch.nn.Module, training: TrainingConfig, fresh: bool) -> torch.nn.Module:
    wrapped = add_lora(model, training.lora, training.seed)
    if fresh and training.lora.init_from is not None:
        start_from_adapter(wrapped, Path(training.lora.init_from))
    return wrapped


def describe_trained(model: torch.nn.Module, training: TrainingConfig) -> dict[str, Any]:
    """For a manifest: the method, adapter_config.json (or None), and trainable parameter → tensor of the exported file."""
    if training.method is Method.FULL:
        names = {name: name for name, _ in model.named_parameters()}
        return {"method": Method.FULL.value, "config": None, "names": names}
    return {"method": Method.LORA.value, "config": adapter_description(model), "names": adapter_names(model)}
