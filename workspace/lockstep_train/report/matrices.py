"""A loaded model's weight matrices, as report/flops.py counts them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from lockstep_train.report.flops import FlopCount, Matrix, count

_LAYER = re.compile(r"\.(layers|h|blocks)\.\d+\.")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def count_flops(model: torch.nn.Module) -> FlopCount:
    """Of a transformers model, with or without an adapter, sharded or not."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = int(config.num_attention_heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return count(matrices(model, _visited_share(config)), heads * head_size * int(config.num_hidden_layers))


def matrices(model: torch.nn.Module, visited_share: float) -> Iterator[Matrix]:
    """Every matrix that is multiplied with. A head that is tied to the embedding counts as a head."""
    embeddings = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = full_shape(parameter)
        if len(shape) < 2 or name.startswith(embeddings) or ".original_module." in name:
            continue  # PEFT keeps the original of a layer that is trained whole, and doesn't call it
        share = visited_share if ".experts." in name else 1.0
        yield Matrix(round(math.prod(shape) * share), parameter.requires_grad, _LAYER.search(name) is not None)


def full_shape(parameter: Any) -> tuple[int, ...]:
    """The weight's own shape, where Stage3 or a quantised format stores another."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return tuple(packed.shape)
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _visited_share(config: Any) -> float:
    """Of the routed experts, the share that a token visits."""
    total = next((getattr(config, name) for name in _EXPERT_COUNTS if getattr(config, name, None)), None)
    visited = getattr(config, "num_experts_per_tok", None)
    return visited / total if total and visited else 1.0
