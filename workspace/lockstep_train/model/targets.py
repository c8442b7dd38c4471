"""Layers of a model that an adapter's settings name, and errors for names of none (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lockstep_spec.training import LoraConfig
from lockstep_train.base.errors import ConfigError

SHOWN = 24


def unmatched_targets(targets: Sequence[str], names: Iterable[str]) -> list[str]:
    """Targets that are no name, nor the end of a dotted name (peft's rule for a list)."""
    every = list(names)
    return [target for target in targets if not matching_names([target], every)]


def matching_names(targets: Sequence[str], names: Iterable[str]) -> list[str]:
    """Names that one of the targets is, or the end of whose dotted parts it is."""
    return [name for name in names if any(name == target or name.endswith(f".{target}") for target in targets)]


def whole_modules(model: torch.nn.Module, targets: Sequence[str]) -> list[str]:
    """Names to give peft as modules_to_save, so that it trains the layers that `targets` name and no others.

    peft asks only how a name ends, and for `norm` trained `q_norm` too. Where that happens the layers' full names are given.
    """
    weighted, modules = weighted_modules(model), [name for name, _ in model.named_modules(remove_duplicate=False)]
    modules_to_save: list[str] = []
    for target in targets:
        named = matching_names([target], weighted)
        modules_to_save += [target] if {name for name in modules if name.endswith(target)} <= set(named) else named
    return list(dict.fromkeys(modules_to_save))


def linear_modules(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def stacked_parameters(model: torch.nn.Module) -> list[str]:
    """Parameters of three dimensions: the fused experts. Under Stage3 the true shape stands beside the empty tensor."""
    return [name for name, parameter in model.named_parameters() if len(getattr(parameter, "ds_shape", parameter.shape)) == 3]


def weighted_modules(model: torch.nn.Module) -> list[str]:
    """Modules that have weights of their own: what can be trained whole."""
    return [name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None]


def check_targets(model: torch.nn.Module, config: LoraConfig) -> None:
    """Raise ConfigError naming the first setting with a name that this model doesn't have, and the names it has."""
    for field, targets, names in (
        ("targetModules", config.target_modules, linear_modules(model)),
        ("targetParameters", config.target_parameters, stacked_parameters(model)),
        ("modulesToSave", config.modules_to_save, weighted_modules(model)),
    ):
        unmatched = unmatched_targets(targets, names)
        if unmatched:
            kind = "stack of experts" if field == "targetParameters" else "module"
            raise ConfigError(
                f"training.lora.{field}: no {kind} named {', '.join(unmatched)} in this model; available: {_shown(names, field)}"
            )
    both = sorted(
        set(matching_names(config.target_modules, linear_modules(model)))
        & set(matching_names(config.modules_to_save, weighted_modules(model)))
    )
    if both:
        raise ConfigError(
            f"training.lora: {_shown(both, 'modulesToSave')} is in both targetModules and modulesToSave; a layer either gets an adapter or is trained whole"
        )
    if config.target_parameters and (config.dropout > 0 or config.dora):
        raise ConfigError('training.lora.targetParameters needs dropout "0" and dora false: peft folds these adapters into the weights')


def _shown(names: Iterable[str], field: str) -> str:
    """The last part of each name; of a stack of experts the last three, since `gate_up_proj` alone would not say where."""
    parts = 3 if field == "targetParameters" else 1
    short = sorted({".".join(name.split(".")[-parts:]) for name in names})
    return ", ".join(short[:SHOWN]) + (", …" if len(short) > SHOWN else "") or "none"
