"""The loss of a micro-batch: summed over its learned tokens, in FP32, without ever holding whole logits.

The model's own forward pass is used unchanged, but for its last layer: while a batch's labels are set, that layer returns the
loss instead of logits (see tiles.py). Under Stage3 its weight is gathered once for that, by DeepSpeed's own hooks. Were the
result an output that needs a gradient, those hooks would gather it a second time in the backward pass, for nothing; so a
frozen layer's loss takes its place in the graph only after the layer has returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lockstep_train.data.sequences.batches import Batch
from lockstep_train.data.tokens.encode import IGNORED
from lockstep_train.engine.experts import Balance
from lockstep_train.engine.tiles import AttachLoss, Gradients, Layer, TrainedLoss, tiled_loss
from lockstep_train.model.logits import ends_with_layer


class TokenLoss:
    """Loss of a batch. Without a tiled head it goes by whole logits. `balance`: of routers that are trained."""

    def __init__(self, engine: Any, head: TiledHead | None, balance: Balance | None = None) -> None:
        self._engine = engine
        self._head = head
        self._balance = balance

    def __call__(self, batch: Batch, batch_targets: Targets | None = None) -> torch.Tensor:
        """Cross-entropy summed over the learned tokens: a scalar, with a gradient unless gradients are off.

        The gradient has the balance loss in it, times the learned tokens, so that a step's is the mean over its tokens; the value hasn't, and
        compares with an evaluation's. `batch_targets`: the batch's targets, where they are at hand; to find them, the host waits for the device.
        """
        batch_targets = batch_targets or targets(batch.labels)
        balance = self._balance if torch.is_grad_enabled() else None
        inputs = batch.inputs if balance is None else {**batch.inputs, "output_router_logits": True}
        with self._head.learning(batch_targets) if self._head is not None else nullcontext():
            output = self._engine(**inputs)
        loss: torch.Tensor = output.logits if self._head is not None else whole_loss(output.logits, batch.labels)
        if balance is None:
            return loss
        added = balance(output.router_logits, batch.real) * batch_targets.places.numel()
        return loss + (added - added.detach())


def whole_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the same from logits [batch, sequence, words]."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )


@dataclass(frozen=True)
class Targets:
    """Targets of a batch: places in the flattened batch, and the word that follows at each. Only these rows reach the last layer."""

    places: torch.Tensor
    classes: torch.Tensor


def targets(labels: torch.Tensor) -> Targets:
    """Find targets in labels [batch, sequence]: the token at place i predicts the one at i + 1."""
    following = torch.full_like(labels, IGNORED)
    following[:, :-1] = labels[:, 1:]
    flat = following.flatten()
    places = (flat != IGNORED).nonzero().squeeze(1)
    return Targets(places, flat[places])


@dataclass(frozen=True)
class Pending:
    """The loss of a frozen layer, until it is given its place in the graph."""

    rows: torch.Tensor
    loss: torch.Tensor
    gradients: Gradients


class TiledHead:
    """The last layer of a causal language model, whose forward pass can be turned into the loss's."""

    def __init__(self, model: torch.nn.Module, layer: torch.nn.Linear) -> None:
        """Replace the forward passes, before DeepSpeed adds its hooks, which must stay outside of them."""
        self._layer = layer
        self._forward_layer = layer.forward
        self._forward_model = model.forward
        self._targets: Targets | None = None
        self._pending: Pending | None = None
        layer.forward = self._layer_forward  # type: ignore[method-assign]
        model.forward = self._model_forward

    @contextmanager
    def learning(self, batch_targets: Targets) -> Iterator[None]:
        """Let forward passes within this give the loss as their `logits`."""
        self._targets = batch_targets
        try:
            yield
        finally:
            self._targets = self._pending = None

    def _layer_forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._targets is None:
            return self._forward_layer(input)
        rows = input.flatten(0, -2).index_select(0, self._targets.places)
        weight, bias, classes = self._layer.weight, self._layer.bias, self._targets.classes
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._layer.parameters()):
            loss: torch.Tensor = TrainedLoss.apply(rows, weight, bias, classes)
            return loss
        loss, gradients = tiled_loss(rows.detach(), Layer(weight, bias, trained=False), classes, torch.is_grad_enabled())
        self._pending = Pending(rows, loss, gradients) if gradients is not None else None
        return loss

    def _model_forward(self, *arguments: Any, **options: Any) -> Any:
        output = self._forward_model(*arguments, **options)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            output.logits = AttachLoss.apply(pending.rows, pending.loss, pending.gradients)
        return output


def tile_head(model: torch.nn.Module) -> tuple[TiledHead | None, str | None]:
    """Prepare a model, wrapped by peft or not, for `TokenLoss`; or say why its loss needs whole logits."""
    causal: Any = getattr(model, "get_base_model", lambda: model)()
    layer = causal.get_output_embeddings()
    if hasattr(layer, "modules_to_save"):  # trained whole: peft keeps a copy of it
        layer = layer.modules_to_save[layer.active_adapter]
    if type(layer) is not torch.nn.Linear:
        return None, f"the model's last layer is a {type(layer).__name__}, not a plain linear one"
    if not ends_with_layer(causal, layer):
        return None, "the model does more to the logits after its last layer"
    return TiledHead(causal, layer), None
