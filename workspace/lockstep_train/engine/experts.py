"""Counts of the tokens that each expert gets: taken on the device, exact under gradient checkpointing, one all-reduce when it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
