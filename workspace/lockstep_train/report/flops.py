"""Floating-point operations of a step, and how many a second the device could do: what MFU and HFU are made of.

A matrix of N weights costs a token 2N operations forward and 2N for the gradient of its input; a trained one 2N more for its own
gradient. So a frozen base costs 4N and full fine-tuning 6N a token. Of routed experts only those count that a token
visits. Causal attention over a document of s tokens costs 2s² × width forward in each layer that has it (half of the square is masked and
not counted) and twice that backward; less where a layer sees a window or a chunk only. Norms, activations, recurrences, embeddings'
look-ups and padding are not counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep_spec.gpus import is_part, known_peak
from lockstep_train.zero.parameters import full_shape

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"\.(layers|h|blocks)\.\d+\.")
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of layers as transformers' configurations name them."""
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Matrix:
    """One weight matrix, or a stack of experts' matrices."""

    weights: int
    """Weights that one token passes."""
    trained: bool
    in_layer: bool
    """True within a decoder layer: computed again in the backward pass by gradient checkpointing."""


@dataclass(frozen=True)
class Attention:
    """Attention of some layers."""

    width: int
    """Heads × their size, over these layers."""
    window: int | None = None
    """Tokens that a token sees, itself among them; None: all before it."""
    chunked: bool = False
    """The window begins anew, instead of moving with each token."""

    def pairs(self, length: int) -> int:
        """Twice the pairs of tokens of a document that see each other."""
        if self.window is None or length <= self.window:
            return length * length
        if self.chunked:
            whole, rest = divmod(length, self.window)
            return whole * self.window**2 + rest**2
        return 2 * self.window * length - self.window**2


@dataclass(frozen=True)
class FlopCount:
    """Cost of one token and of one document."""

    frozen: int
    trained: int
    in_layers: int
    """Weights of both within decoder layers."""
    attention: tuple[Attention, ...]

    @property
    def active_weights(self) -> int:
        return self.frozen + self.trained

    def needed(self, documents: Iterable[int]) -> int:
        """Operations that the mathematics of a step needs: `documents` are lengths in tokens. What MFU counts."""
        lengths = list(documents)
        return (4 * self.frozen + 6 * self.trained) * sum(lengths) + 6 * self._attended(lengths)

    def recomputed(self, documents: Iterable[int], products: float = 1.0, attention: float = 1.0) -> float:
        """Operations that gradient checkpointing does on top, which HFU counts, too: the forward pass once more, by the shares of the
        layers that compute products, and attention, again.
        """
        lengths = list(documents)
        return 2 * self.in_layers * sum(lengths) * products + 2 * self._attended(lengths) * attention

    def _attended(self, lengths: Iterable[int]) -> int:
        return sum(layers.width * layers.pairs(length) for length in lengths for layers in self.attention)


def count(matrices: Iterable[Matrix], attention: Iterable[Attention]) -> FlopCount:
    listed = list(matrices)
    return FlopCount(
        frozen=sum(matrix.weights for matrix in listed if not matrix.trained),
        trained=sum(matrix.weights for matrix in listed if matrix.trained),
        in_layers=sum(matrix.weights for matrix in listed if matrix.in_layer),
        attention=tuple(attention),
    )


def peak_flops(device: str, precision: str) -> tuple[float | None, str | None]:
    """Peak FLOP/s of one device, or None and why."""
    if precision == "FP32":
        return None, "FP32 uses no tensor cores, so there is no MFU"
    if is_part(device):
        return None, f"the peak FLOP/s of a part of a GPU are not known ({device})"
    peak = known_peak(device)
    return peak, None if peak else f"no peak FLOP/s is known for the device {device}"


def count_flops(model: torch.nn.Module) -> FlopCount:
    """Count the operations of a transformers model, with or without an adapter, sharded or not."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return count(matrices(model, _visited_share(config)), attention_layers(config))


WITHOUT_ATTENTION = ("linear_attention", "conv", "moe", "mlp", "mamba", "sparse", "dense")
"""Types of layers in transformers' configurations: recurrent, convolutional, feed-forward."""


def attention_layers(config: Any) -> Iterator[Attention]:
    """Yield the attention of a model's layers, by its configuration. Raises AttributeError for a type of layers that isn't known."""
    heads = int(config.num_attention_heads)
    width = heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * int(config.num_hidden_layers)
    for kind, number in Counter(kinds).items():
        if kind in (FULL, "attention", "hybrid"):
            yield Attention(number * width)
        elif kind in (SLIDING, CHUNKED):
            yield Attention(number * width, chunk if kind == CHUNKED else window, kind == CHUNKED)
        elif kind not in WITHOUT_ATTENTION:
            raise AttributeError(f"what the attention of a layer of type {kind} costs is not known")


def text_parts(model: Any) -> list[str]:
    """Names of the parts that text passes, of a model that also sees or hears: its decoder and its head; [] where that is all of the
    model.
    """
    config = getattr(model, "config", None)
    if config is None or config.get_text_config() is config:
        return []
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is None or decoder is model:  # transformers can't tell it from the rest
        return []
    return [name for name, module in model.named_modules() if module is decoder or module is head]


def matrices(model: torch.nn.Module, visited_share: float) -> Iterator[Matrix]:
    """Every matrix that text is multiplied with. A head that is tied to the embedding counts as a head."""
    import torch

    parts = tuple(f"{part}." for part in text_parts(model)) or ("",)
    embeddings = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = _unpacked_shape(parameter)
        if len(shape) < 2 or not name.startswith(parts) or name.startswith(embeddings) or ".original_module." in name:
            continue  # PEFT keeps the original of a layer that is trained whole, and doesn't call it
        share = visited_share if ".experts." in name else 1.0
        yield Matrix(round(math.prod(shape) * share), parameter.requires_grad, _LAYER.search(name) is not None)


def _unpacked_shape(parameter: Any) -> tuple[int, ...]:
    """The weight's own shape, where Stage3 or a quantized format stores another."""
    packed = getattr(parameter, "quant_state", None)
    return full_shape(parameter) if packed is None else tuple(packed.shape)


def _visited_share(config: Any) -> float:
    """Share of the routed experts that a token visits."""
    total = next((getattr(config, name) for name in _EXPERT_COUNTS if getattr(config, name, None)), None)
    visited = getattr(config, "num_experts_per_tok", None)
    return visited / total if total and visited else 1.0
