"""Starting with the weights of an adapter that exists (`lora.initFrom`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.modelnames import model_title
from lockstep_train.base.errors import ConfigError, refusal
from lockstep_train.model.lora import adapter_description, adapter_names

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
WORDS = {
    "peft_type": "kind",
    "r": "rank",
    "lora_alpha": "alpha",
    "use_rslora": "rankStabilized",
    "use_dora": "dora",
    "target_modules": "targetModules",
    "target_parameters": "targetParameters",
    "modules_to_save": "modulesToSave",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "bias": "bias",
}
"""Settings that change what an adapter's tensors mean, and what a refusal calls them."""


def start_from_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Copy the adapter's tensors into the wrapped model, before the engine; under Stage3 on every rank, a collective.

    Raises ConfigError naming every difference: another rank, other targets, another base model.
    """
    mine = adapter_description(model)
    theirs = read_description(folder)
    differences = description_differences(theirs, mine)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = adapter_names(model)
    tensors = _read_tensors(folder)
    if not differences:
        wanted = {names[name]: tuple(getattr(item, "ds_shape", item.shape)) for name, item in parameters.items()}
        differences = tensor_differences({name: tuple(tensor.shape) for name, tensor in tensors.items()}, wanted)
    if differences:
        raise ConfigError(
            f"training.lora.initFrom {folder} doesn't fit this run: {'; '.join(differences)}; set training.lora to what it was trained with, or leave initFrom out"
        )
    for name, parameter in parameters.items():
        _copy(parameter, tensors[names[name]])


def read_description(folder: Path) -> dict[str, Any]:
    """adapter_config.json. Raises ConfigError when the folder has none that can be read."""
    try:
        description = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(
            f"training.lora.initFrom {folder} has no readable {CONFIG} ({error}); it must be the folder of a PEFT adapter", error
        ) from error
    if not isinstance(description, dict):
        raise ConfigError(f"training.lora.initFrom {folder}: {CONFIG} is no JSON object; it must be the folder of a PEFT adapter")
    return description


def description_differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """What the adapter has otherwise than this run, in words (pure). Targets given as a pattern are left to the tensors' names."""
    found = [
        f"its {word} is {_say(theirs[key])}, not {_say(mine[key])}"
        for key, word in WORDS.items()
        if key in theirs and _comparable(theirs[key]) != _comparable(mine[key]) and not _is_pattern(key, theirs[key])
    ]
    base, wanted = (Path(model_title(str(value.get("base_model_name_or_path") or ""))).name for value in (theirs, mine))
    if base and wanted and base != wanted:
        found.append(f"its base model is {base}, not {wanted} (base_model_name_or_path in {CONFIG})")
    return found


def tensor_differences(theirs: Mapping[str, tuple[int, ...]], mine: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The first tensor that is missing, unknown, or of another shape, in words (pure)."""
    for name in sorted(theirs.keys() ^ mine.keys()):
        return [f"it has no tensor {name}" if name in mine else f"its tensor {name} belongs to no trained layer"]
    for name in sorted(mine):
        if theirs[name] != mine[name]:
            return [f"its tensor {name} has the shape {list(theirs[name])}, not {list(mine[name])}"]
    return []


def _is_pattern(key: str, value: object) -> bool:
    return key in {"target_modules", "modules_to_save"} and isinstance(value, str)


def _comparable(value: object) -> object:
    """Order doesn't count in a list, and none is the same as an empty one."""
    return (sorted(map(str, value)) if isinstance(value, list | set | tuple) else value) or None


def _say(value: object) -> str:
    return (", ".join(sorted(map(str, value))) if isinstance(value, list | set | tuple) else json.dumps(value)) or "empty"


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise refusal(
            f"training.lora.initFrom {folder} has no readable {WEIGHTS} ({error}); save the adapter with safetensors", error
        ) from error


@torch.no_grad()
def _copy(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    if not hasattr(parameter, "ds_id"):
        parameter.copy_(value)
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(parameter, modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.copy_(value)
