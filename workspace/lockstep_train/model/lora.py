"""LoRA by peft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lockstep_train.config import LoraConfig
from lockstep_train.errors import ConfigError


def unmatched_targets(targets: Sequence[str], modules: Iterable[str]) -> list[str]:
    """Targets that are the name, or the end of the dotted name, of no module (peft's rule for a list)."""
    names = list(modules)
    return [target for target in targets if not any(name == target or name.endswith(f".{target}") for name in names)]


def linear_modules(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def add_lora(model: torch.nn.Module, config: LoraConfig, seed: int) -> torch.nn.Module:
    """Wrap the model; the adapter's first weights depend on the seed alone. Raises ConfigError naming the available modules."""
    import peft

    linear = linear_modules(model)
    unmatched = unmatched_targets(config.target_modules, linear)
    if unmatched:
        available = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ConfigError(
            f"training.lora.targetModules: no module named {', '.join(unmatched)} in this model; available: {', '.join(available)}"
        )
    torch.manual_seed(seed)
    # autocast_adapter_dtype would keep the adapter in FP32 under Stage3 but not under Stage2; masters are FP32 in both anyway.
    wrapped: torch.nn.Module = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=list(config.target_modules),
            task_type="CAUSAL_LM",
        ),
        autocast_adapter_dtype=False,
    )
    return wrapped


def adapter_description(model: torch.nn.Module) -> dict[str, Any]:
    """adapter_config.json as peft writes it, as a plain JSON object."""
    config: dict[str, Any] = model.peft_config["default"].to_dict()  # type: ignore[index,union-attr]
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()} | {"inference_mode": True}


def adapter_names(parameters: Iterable[str]) -> dict[str, str]:
    """Parameter name in the wrapped model → tensor name in adapter_model.safetensors (peft drops the adapter's own name)."""
    return {name: name.replace(".default.", ".") for name in parameters}
