"""Floating-point operations of a step, and how many a second the device could do: what MFU and HFU are made of.

A matrix of N weights costs a token 2N operations forward and 2N for the gradient of its input; a trained one 2N more for its own
gradient. So a frozen base costs 4N and full fine-tuning 6N a token. Of routed experts only those count that a token
visits. Causal attention over a document of s tokens costs 2s² × width forward in every layer (half of the square is masked and
not counted) and twice that backward. Norms, activations, embeddings' look-ups and padding are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PEAKS: Mapping[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H800": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H20": 148e12,
    "A800": 312e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI355X": 2516.6e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 383e12,
}
"""Dense BF16 with FP32 accumulation, FLOP/s of one device, from its maker's data sheet (half of a figure given "with sparsity").
The first name that is a word of the device's counts, so a variant stands before its family."""


@dataclass(frozen=True)
class Matrix:
    """One weight matrix, or a stack of experts' matrices."""

    weights: int
    """That one token passes."""
    trained: bool
    in_layer: bool
    """Within a decoder layer: computed again in the backward pass by gradient checkpointing."""


@dataclass(frozen=True)
class FlopCount:
    """What one token and one document cost."""

    frozen: int
    trained: int
    in_layers: int
    """Of both, the weights within decoder layers."""
    attention_width: int
    """Heads × their size, over all layers."""

    @property
    def active_weights(self) -> int:
        return self.frozen + self.trained

    def needed(self, documents: Iterable[int]) -> int:
        """Operations that the mathematics of a step needs: `documents` are lengths in tokens. What MFU counts."""
        lengths = list(documents)
        return (4 * self.frozen + 6 * self.trained) * sum(lengths) + 6 * self.attention_width * sum(length * length for length in lengths)

    def recomputed(self, documents: Iterable[int]) -> int:
        """What gradient checkpointing does on top: each layer's forward pass once more. HFU counts it too."""
        lengths = list(documents)
        return 2 * self.in_layers * sum(lengths) + 2 * self.attention_width * sum(length * length for length in lengths)


def count(matrices: Iterable[Matrix], attention_width: int) -> FlopCount:
    listed = list(matrices)
    return FlopCount(
        frozen=sum(matrix.weights for matrix in listed if not matrix.trained),
        trained=sum(matrix.weights for matrix in listed if matrix.trained),
        in_layers=sum(matrix.weights for matrix in listed if matrix.in_layer),
        attention_width=attention_width,
    )


def peak_flops(device: str, precision: str) -> tuple[float | None, str | None]:
    """FLOP/s of one device, or None and why."""
    if precision == "FP32":
        return None, "FP32 has no tensor cores to be utilised"
    if re.search(r"\bMIG\b", device):
        return None, f"the peak FLOP/s of a part of a GPU are not known ({device})"
    for name, peak in PEAKS.items():
        if re.search(rf"\b{name}\b", device, re.IGNORECASE):
            return peak, None
    return None, f"no peak FLOP/s is known for the device {device}"
