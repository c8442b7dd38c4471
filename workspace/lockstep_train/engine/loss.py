"""The loss of a micro-batch: summed over its learned tokens, in FP32, without ever holding whole logits.

The model's own forward pass is used unchanged, but for its last layer: while a batch's labels are set, that layer returns the
loss instead of logits. Under Stage3 its weight is gathered once for that, by DeepSpeed's own hooks. Were the
result an output that needs a gradient, those hooks would gather it a second time in the backward pass, for nothing; so a
frozen layer's loss takes its place in the graph only after the layer has returned.

The cross-entropy goes through that layer tile by tile of tokens, together with its gradients. The logits of a long sequence are the largest
tensor of a training step (16k tokens × 150k words in FP32: 10 GB), and their gradient is as large again. Here only one tile of them exists
at a time: its loss, and what its gradient is for the layer's input and weight, are computed before the next tile's logits overwrite it. So
the forward pass does the backward pass's work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from lockstep_spec.activations import TILE_ELEMENTS
from lockstep_train.data.sequences.batches import Batch
from lockstep_train.data.tokens.encode import IGNORED
from lockstep_train.engine.experts import Balance
from lockstep_train.model.logits import ends_with_layer


class TokenLoss:
    """Loss of a batch. Without a tiled head it goes by whole logits. `balance`: of routers that are trained."""

    def __init__(self, engine: Any, head: TiledHead | None, balance: Balance | None = None) -> None:
        self._engine = engine
        self._head = head
        self._balance = balance

    def __call__(self, batch: Batch, batch_targets: Targets | None = None) -> torch.Tensor:
        """Cross-entropy summed over the learned tokens: a scalar, with a gradient unless gradients are off.

        The gradient has the balance loss in it, times the learned tokens, so that a step's is the mean over its tokens; the value hasn't,
        and compares with an evaluation's. `batch_targets`: the batch's targets, where they are at hand; to find them, the host waits for
        the device.
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


FP16_SCALE = 1024.0
"""Gradients of single logits are softmax probabilities: in FP16 those below 6e-8 would be lost, which over 150k words adds up."""


@dataclass
class Gradients:
    """Gradients of the summed loss; for `weight` and `bias` only where they are trained."""

    rows: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    scale: float
    """Factor that they are multiplied by."""


@dataclass(frozen=True)
class Layer:
    """A linear layer from [tokens, hidden] to [tokens, words]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    trained: bool


@torch.no_grad()
def tiled_loss(rows: torch.Tensor, layer: Layer, classes: torch.Tensor, gradients: bool) -> tuple[torch.Tensor, Gradients | None]:
    """Summed cross-entropy in FP32 of rows [tokens, hidden] against classes [tokens]; without tokens it is 0."""
    size = max(1, TILE_ELEMENTS // layer.weight.shape[0])
    result = _room(rows, layer) if gradients else None
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    for start in range(0, len(rows), size):
        tile = slice(start, start + size)
        logarithms = linear(rows[tile], layer.weight, layer.bias).log_softmax(-1, dtype=torch.float32)
        total -= logarithms.gather(-1, classes[tile, None]).sum()
        if result is not None:
            _add_gradients(result, logarithms, rows, classes, layer, tile)
        del logarithms  # else they would lie beside the next tile's
    return total, result


def _room(rows: torch.Tensor, layer: Layer) -> Gradients:
    """Room for the gradients. The weight's is summed over tiles in FP32: in BF16 every addition would round."""
    weight = torch.zeros_like(layer.weight, dtype=torch.float32) if layer.trained else None
    bias = torch.zeros_like(layer.bias, dtype=torch.float32) if layer.trained and layer.bias is not None else None
    return Gradients(torch.zeros_like(rows), weight, bias, FP16_SCALE if rows.dtype is torch.float16 else 1.0)


def _add_gradients(
    sums: Gradients,
    logarithms: torch.Tensor,
    rows: torch.Tensor,
    classes: torch.Tensor,
    layer: Layer,
    tile: slice,
) -> None:
    """softmax(logits) − onehot(class), in the memory of the softmax's logarithms, through the layer to its input and its weight."""
    change, rows_classes = logarithms.exp_(), classes[tile, None]
    change.scatter_add_(-1, rows_classes, torch.full_like(rows_classes, -1.0, dtype=change.dtype))
    if sums.scale != 1:
        change.mul_(sums.scale)
    low = change.to(rows.dtype)
    sums.rows[tile] = low @ layer.weight
    if sums.weight is not None:
        sums.weight += low.T @ rows[tile]
    if sums.bias is not None:
        sums.bias += change.sum(0)


class AttachLoss(torch.autograd.Function):
    """Give a loss that was computed elsewhere its place in the graph: its gradient for `rows` is known already."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, loss: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradients, ctx.gradients = ctx.gradients, None
        return _scaled(gradients.rows, outputs[0] / gradients.scale, gradients.rows.dtype), None, None


class TrainedLoss(torch.autograd.Function):
    """Tiled loss where the layer itself is trained, too."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, classes: torch.Tensor) -> torch.Tensor:
        loss, ctx.gradients = tiled_loss(rows, Layer(weight, bias, trained=True), classes, gradients=True)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        scale = outputs[0] / gradients.scale
        bias = None if gradients.bias is None else _scaled(gradients.bias, scale, ctx.dtype)
        return _scaled(gradients.rows, scale, gradients.rows.dtype), _scaled(gradients.weight, scale, ctx.dtype), bias, None


def _scaled(tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale in FP32 first: with FP16's loss scale the product of two FP16 numbers may overflow where the result doesn't."""
    return (tensor.float() * scale.float()).to(dtype)
