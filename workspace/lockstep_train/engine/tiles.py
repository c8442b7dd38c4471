"""Cross-entropy through a linear layer, tile by tile of tokens, together with its gradients.

The logits of a long sequence are the largest tensor of a training step (16k tokens × 150k words in FP32: 10 GB), and their
gradient is as large again. Here only one tile of them exists at a time: its loss, and what its gradient is for the layer's
input and weight, are computed before the next tile's logits overwrite it. So the forward pass does the backward pass's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from lockstep_spec.activations import TILE_ELEMENTS

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
        ctx.found = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradients, ctx.found = ctx.found, None
        return _scaled(gradients.rows, outputs[0] / gradients.scale, gradients.rows.dtype), None, None


class TrainedLoss(torch.autograd.Function):
    """Tiled loss where the layer itself is trained, too."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, classes: torch.Tensor) -> torch.Tensor:
        loss, ctx.found = tiled_loss(rows, Layer(weight, bias, trained=True), classes, gradients=True)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.found = ctx.found, None
        scale = outputs[0] / gradients.scale
        bias = None if gradients.bias is None else _scaled(gradients.bias, scale, ctx.dtype)
        return _scaled(gradients.rows, scale, gradients.rows.dtype), _scaled(gradients.weight, scale, ctx.dtype), bias, None


def _scaled(tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale in FP32 first: with FP16's loss scale the product of two FP16 numbers may overflow where the result doesn't."""
    return (tensor.float() * scale.float()).to(dtype)
