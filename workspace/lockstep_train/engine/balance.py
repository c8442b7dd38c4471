"""The loss that keeps the experts of a trained router evenly loaded: the model's own, as transformers has it.

Without it a router that learns soon sends most tokens to few experts. Routers that stay frozen, as beside most adapters, need none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep_train.engine.experts import find_routers

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
        """Loss of one micro-batch, times the factor: a scalar. `router_logits`: [batch × sequence, experts] a layer; `real` [batch, sequence] is False on padding."""
        return self.coefficient * self.loss(router_logits, self.experts, self.top_k, real)


def find_balance(model: torch.nn.Module) -> tuple[Balance | None, str | None]:
    """Find the balance loss of a model, wrapped by peft or not, whose routers are trained; or a warning that it has none. (None, None): none is needed."""
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
    return None, (
        f"Warning: the routers of this model are trained without a loss that keeps their experts evenly loaded ({cause}); "
        f"{watch}train an adapter with the routers left out if few experts take most tokens"
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
