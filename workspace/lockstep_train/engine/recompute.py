"""Activations that the backward pass computes again: gradient checkpointing of the layers that the memory plan chose, of each as little as
it chose.

torch's own selective checkpointing counts every operation of a layer, those of DeepSpeed's hooks as well, which gather another number of
weights the second time. So what is kept is handed on here, in the order in which it was computed.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from lockstep_spec.choices import Recompute
from lockstep_spec.settings import Level, Recomputed
from lockstep_train.base.errors import ConfigError

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "transformers::grouped_mm_fallback")
MANY = 1 << 16
"""More arguments than an operation has."""


def recompute_layers(base: Any, recomputed: Recomputed, asked: Recompute, say: Callable[[str], None]) -> list[torch.nn.Module]:
    """Turn on gradient checkpointing in the layers that are computed again, and return the others, which keep what they computed.

    Non-reentrant: the other kind loses gradients where a layer's input needs none, as on a frozen base. Raises ConfigError for a model
    without it, where All is asked for.
    """
    if recomputed.level is Level.NONE:
        return [base]
    if not base.supports_gradient_checkpointing:
        problem = f"{type(base).__name__} can't compute its layers again in the backward pass"
        if asked is Recompute.ALL:
            raise ConfigError(f"training.optimization.recompute is All, but {problem}; set it to None")
        say(f"{problem}, so they keep their activations")
        return [base]
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    levels = [(layer, recomputed.of(number)) for number, layer in enumerate(decoder_layers(base))]
    for layer, level in levels:
        layer.gradient_checkpointing = level is not Level.NONE
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False, **_contexts(base, level))
    return [layer for layer, level in levels if level is Level.NONE]


def decoder_layers(base: Any) -> list[Any]:
    """Return the layers of the decoder that can be computed again, in their order; [] for a model whose own code does that."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in (base.get_decoder() or base).modules() if isinstance(module, GradientCheckpointingLayer)]


def _contexts(base: Any, level: Level) -> dict[str, Any]:
    """Return what torch's checkpoint needs to keep what isn't computed again."""
    if level is Level.ALL:
        return {}
    width = base.config.get_text_config().hidden_size if level is Level.NORMS else None

    def contexts() -> tuple[Keeping, Replaying]:
        outputs: deque[Any] = deque()
        return Keeping(width, outputs), Replaying(width, outputs)

    return {"context_fn": contexts}


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first pass over a layer: appends the outputs of attention, and of products at least as wide as `width`, if that is given, to
    `outputs`.
    """

    def __init__(self, width: int | None, outputs: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._width = width
        self._outputs = outputs

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled attention stays compiled, and is computed again."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "_schema", None) is not None and function._schema.is_mutable:
            self._spare(args)
        output = function(*args, **kwargs or {})
        if is_kept(function, args, self._width):
            self._outputs.append(tree_map_only(torch.Tensor, torch.Tensor.detach, output))  # autograd marks the output itself
        return output

    def _spare(self, args: Any) -> None:
        """Copy what is kept of tensors that an operation may write to, such as DeepSpeed's linear layer, which adds its bias in place."""
        touched = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for place, output in enumerate(self._outputs):
            if any(isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in touched for leaf in tree_leaves(output)):
                self._outputs[place] = tree_map_only(torch.Tensor, torch.Tensor.clone, output)


class Replaying(Keeping):  # type: ignore[no-untyped-call]
    """The second pass: takes these outputs from `outputs` in place of computing them."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._outputs.popleft() if is_kept(function, args, self._width) else function(*args, **kwargs or {})


def is_kept(function: Any, args: Any, width: int | None) -> bool:
    """Return True for attention that draws no random numbers, which the second pass would miss, and for a product of rows at least as long
    as `width`.
    """
    kind = _kind(function)
    if kind is None:
        return False
    if kind < 0:
        rows = args[1 if function.name() == "aten::addmm" else 0]
        return width is not None and rows.shape[-1] >= width
    return len(args) <= kind or not args[kind]


@functools.cache
def _kind(function: Any) -> int | None:
    """Return -1 for a product of matrices, the place of the dropout among the arguments of attention, and None for any other operation."""
    name = function.name().partition(".")[0]
    if name in PRODUCTS:
        return -1
    if "attention" not in name and "attn" not in name:
        return None
    schema = getattr(function, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index("dropout_p") if "dropout_p" in names else MANY
