"""Test, by the model's own code, that a model's logits are what its last layer gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def ends_with_layer(causal: Any, layer: torch.nn.Linear) -> bool:
    """Return True if the model returns its last layer's output as it is; some scale or cap it (Gemma, Cohere, Granite).

    Asked of the model's own code: its forward pass is run with a body and a last layer that only hand out given tensors.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    output = torch.linspace(-90.0, 90.0, 6).view(1, 2, 3)
    body = MoeModelOutputWithPast(last_hidden_state=torch.zeros(1, 2, layer.in_features))
    with _forward(getattr(causal, causal.base_model_prefix), body), _forward(layer, output), torch.no_grad():
        try:
            returned = causal.forward(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
        except Exception:  # whatever a model does that isn't understood here: whole logits are always right
            return False
    return isinstance(returned, torch.Tensor) and torch.equal(returned.float(), output)


@contextmanager
def _forward(module: torch.nn.Module, output: Any) -> Iterator[None]:
    """Let the module's forward pass give `output` within this."""
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward  # the class's own is behind it
