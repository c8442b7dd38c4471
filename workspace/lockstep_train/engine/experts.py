"""Routed experts: counts of the tokens that each gets, and the loss that keeps those of a trained router evenly loaded.

Counts are taken on the device, exact under gradient checkpointing, with one all-reduce when they are read. The loss is the model's own, as
transformers has it: without it a router that learns soon sends most tokens to few experts. Routers that stay frozen, as beside most
adapters, need none.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep_train.data.sequences.batches import Batch
from lockstep_train.data.tokens.encode import IGNORED

ROUTER_CLASSES = ("TopkRouter", "TopKRouter")
DIGITS = 6


@dataclass(frozen=True)
class LayerUsage:
    """Choices of one layer's router since the last reading, over all ranks."""

    layer: int
    counts: tuple[int, ...]
    """Tokens routed to each expert; a token counts once for each of its top_k experts."""

    @property
    def shares(self) -> tuple[float, ...]:
        total = sum(self.counts)
        return tuple(count / total if total else 0.0 for count in self.counts)

    @property
    def entropy(self) -> float:
        """Entropy of the shares, as a part of its greatest value: 1 is an even load, 0 a single expert."""
        if len(self.counts) < 2:
            return 1.0
        return -sum(share * math.log(share) for share in self.shares if share) / math.log(len(self.counts))


def usage_fields(layers: Sequence[LayerUsage]) -> dict[str, dict[str, Any]]:
    """Fields beside the counts in expert_usage.jsonl: field → layer → value."""
    return {
        "share": {str(item.layer): [round(share, DIGITS) for share in item.shares] for item in layers},
        "entropy": {str(item.layer): round(item.entropy, DIGITS) for item in layers},
        "maxShare": {str(item.layer): round(max(item.shares), DIGITS) for item in layers},
    }


class ExpertUsage:
    """Counter of this rank. Nothing in it waits for the device until `collect`."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        routers = find_routers(model)
        self.layers = [layer for layer, _ in routers]
        self._experts = max((int(router.num_experts) for _, router in routers), default=0)
        self._sizes = [int(router.num_experts) for _, router in routers]
        self._counts = torch.zeros(len(routers), self._experts, dtype=torch.int64, device=device)
        self._real: torch.Tensor | None = None
        for row, (_, router) in enumerate(routers):
            router.register_forward_hook(self._hook(row))

    def look_at(self, batch: Batch) -> None:
        """Look at a batch before its forward pass: padding doesn't count, nor a row in which nothing is learned (the ghosts that give
        every rank equal work)."""
        learned = (batch.labels != IGNORED).any(dim=1, keepdim=True)
        self._real = (batch.real & learned).flatten().long()

    def _hook(self, row: int) -> Any:
        def count(router: torch.nn.Module, inputs: Any, output: Any) -> None:
            # Gradient checkpointing runs the router a second time, inside of a backward pass: that one is no new token.
            if not router.training or self._real is None or torch._C._current_graph_task_id() != -1:
                return
            chosen = chosen_experts(output)
            weights = self._real.unsqueeze(1).expand(-1, chosen.shape[-1])
            self._counts[row].scatter_add_(0, chosen.flatten(), weights.reshape(-1))

        return count

    def collect(self) -> list[LayerUsage]:
        """Sum what all ranks counted since the last call. A collective, of 8 bytes a layer and expert."""
        total = self._counts.clone()
        dist.all_reduce(total)
        self._counts.zero_()
        rows: list[list[int]] = total.tolist()
        return [LayerUsage(layer, tuple(row[:size])) for layer, row, size in zip(self.layers, rows, self._sizes, strict=True)]


def count_experts(model: torch.nn.Module, device: torch.device) -> ExpertUsage | None:
    """Start counting. None for a model without routers."""
    usage = ExpertUsage(model, device)
    return usage if usage.layers else None


def find_routers(model: torch.nn.Module) -> list[tuple[int, Any]]:
    """(layer, router) of every layer whose router transformers' way returns (logits, weights, chosen experts)."""
    return [
        (layer_number(name), module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith(ROUTER_CLASSES) and hasattr(module, "num_experts")
    ]


def layer_number(name: str) -> int:
    """`model.layers.3.mlp.gate` → 3."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def chosen_experts(output: Sequence[torch.Tensor]) -> torch.Tensor:
    """Expert numbers [tokens, top_k]: the router's only output of whole numbers."""
    return next(tensor for tensor in output if not tensor.is_floating_point())


ROUTER_CLASS = re.compile(r"Router$|Gating$|MoE\w*Gate$", re.IGNORECASE)
"""Names that transformers gives a router's class."""
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the factor: that of nearly all models, and JetMoe's."""


@dataclass(frozen=True)
class Balance:
    """Balance loss: a factor, and a loss of all routers' logits: 1 a top_k-th expert where the load is even, and more where it isn't."""

    coefficient: float
    experts: int
    top_k: int
    loss: Callable[..., torch.Tensor]

    def __call__(self, router_logits: tuple[torch.Tensor, ...], real: torch.Tensor) -> torch.Tensor:
        """Loss of one micro-batch, times the factor: a scalar. `router_logits`: [batch × sequence, experts] a layer; `real` [batch,
        sequence] is False on padding.
        """
        return self.coefficient * self.loss(router_logits, self.experts, self.top_k, real)


def find_balance(model: torch.nn.Module) -> tuple[Balance | None, str | None]:
    """Find the balance loss of a model, wrapped by peft or not, whose routers are trained; or a warning that it has none. (None, None):
    none is needed.
    """
    if not any(trained_routers(model)):
        return None, None
    causal: Any = getattr(model, "get_base_model", lambda: model)()
    loss = getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)
    field = next((name for name in COEFFICIENTS if hasattr(causal, name)), COEFFICIENTS[0])
    coefficient = float(getattr(causal, field, 0) or 0)
    if loss is not None and coefficient > 0:
        return Balance(coefficient, causal.num_experts, causal.num_experts_per_tok, loss), None
    cause = f"its config.json has {field} 0" if loss is not None else f"transformers has none for {causal.config.model_type}"
    watch = "watch maxShare in logs/expert_usage.jsonl, and " if find_routers(causal) else ""
    return (
        None,
        (
            f"Warning: the routers of this model are trained without a loss that keeps their experts evenly loaded ({cause}); "
            f"{watch}train an adapter with the routers left out if few experts take most tokens"
        ),
    )


def trained_routers(model: torch.nn.Module) -> Iterator[str]:
    """Names of routers that have a trained weight, be it their own, a copy that peft trains, or an adapter's."""
    modules = dict(model.named_modules())
    names = {name.removesuffix(".base_layer").removesuffix(".original_module") for name in modules if _is_router(name, modules)}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return (router for router in sorted(names) if any(name.startswith(f"{router}.") for name in trained))


def _is_router(name: str, modules: Mapping[str, torch.nn.Module]) -> bool:
    """Return True for a router, by its class, or as the `gate` or `router` beside `experts`, whatever its class is."""
    parent, _, last = name.rpartition(".")
    return ROUTER_CLASS.search(type(modules[name]).__name__) is not None or (last in {"gate", "router"} and f"{parent}.experts" in modules)
