"""Test, by the model's own code, that a model's logits are what its last layer gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _BodyOutput(tuple[torch.Tensor]):
    """Output of a model's body: the last hidden state alone, and None for all else that a model asks of it, such as what a vision tower
    sees.
    """

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def ends_with_layer(causal: Any, layer: torch.nn.Linear) -> bool:
    """Return True if the model returns its last layer's output as it is; some scale or cap it (Gemma, Cohere, Granite).

    Asked of the model's own code: its forward pass is run with a body and a last layer that only hand out given tensors.
    """
    output = torch.linspace(-90.0, 90.0, 6).view(1, 2, 3)
    try:
        body = getattr(causal, causal.base_model_prefix, None) or causal.model  # Llama 4 has another prefix for its text alone
        hidden = _BodyOutput([torch.zeros(1, 2, layer.in_features)])
        with _forward(body, hidden), _forward(layer, output), torch.no_grad():
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
