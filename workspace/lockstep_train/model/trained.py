"""The trained part of a model: an adapter by peft beside its frozen weights, fresh or from `lora.initFrom`, or every weight; and the layers
that an adapter's settings name.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Method
from lockstep_spec.families import moved_targets
from lockstep_spec.memory import trained_parts
from lockstep_spec.modelnames import model_title
from lockstep_spec.shape import Weight, matching_names
from lockstep_spec.training import LoraConfig, TrainingConfig
from lockstep_spec.words import listed
from lockstep_train.base.errors import ConfigError, reason_of, refusal
from lockstep_train.base.imports import import_peft
from lockstep_train.base.limits import Say
from lockstep_train.checkpoint.format.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lockstep_train.report.flops import text_parts
from lockstep_train.zero.parameters import full_shape, gather_as_one, is_sharded, set_values


def unmatched_targets(targets: Sequence[str], names: Iterable[str]) -> list[str]:
    """Targets that are no name, nor the end of a dotted name (peft's rule for a list)."""
    every = list(names)
    return [target for target in targets if not matching_names([target], every)]


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


def model_weights(model: torch.nn.Module) -> Iterator[Weight]:
    """Yield a model's parameters, tied ones under each of their names, with their true shapes where they are sharded or packed."""
    linear = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    parts = text_parts(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = linear.get(name)
        shape = full_shape(parameter) if layer is None else (layer.out_features, layer.in_features)
        yield Weight(name, shape, layer is not None, bool(parts) and not name.startswith(tuple(f"{part}." for part in parts)))


def linear_modules(model: torch.nn.Module) -> list[str]:
    return [weight.module for weight in model_weights(model) if weight.linear and not weight.tower]


def weighted_modules(model: torch.nn.Module) -> list[str]:
    """Modules that have weights of their own: what can be trained whole."""
    return list(dict.fromkeys(weight.module for weight in model_weights(model) if not weight.tower))


def check_targets(model: torch.nn.Module, config: LoraConfig) -> None:
    """Raise ConfigError naming the first setting with a name that this model doesn't have, and the names it has."""
    stacks = [weight.name for weight in model_weights(model) if len(weight.shape) == 3 and not weight.tower]  # the fused experts
    for field, targets, names in (
        ("targetModules", config.target_modules, linear_modules(model)),
        ("targetParameters", config.target_parameters, stacks),
        ("modulesToSave", config.modules_to_save, weighted_modules(model)),
    ):
        unmatched = unmatched_targets(targets, names)
        if unmatched and field == "targetModules" and not unmatched_targets(unmatched, weighted_modules(model)):
            raise ConfigError(
                f"training.lora.targetModules: {', '.join(unmatched)} is no linear layer (an embedding or a norm), and only those get an"
                " adapter here; train it whole by training.lora.modulesToSave, or leave it out"
            )
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
            f"training.lora: {_shown(both, 'modulesToSave')} is in both targetModules and modulesToSave; a layer either gets an adapter or"
            " is trained whole"
        )


def refuse_moved(folder: Path, targets: Sequence[str]) -> None:
    """Raise ConfigError, before weights are loaded, for targets that peft is known to move to other layers of the folder's model."""
    try:
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (ValueError, TypeError, KeyError):
        return  # loading the model says what is wrong with its config.json
    if problem := moved_targets(model_type, targets):
        raise ConfigError(problem)


def _shown(names: Iterable[str], field: str) -> str:
    """The last part of each name; of a stack of experts the last three, since `gate_up_proj` alone would not say where."""
    parts = 3 if field == "targetParameters" else 1
    short = sorted({".".join(name.split(".")[-parts:]) for name in names})
    return listed(short) or "none"


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
TIED_WARNING = "Model has `tie_word_embeddings=True`"


def add_lora(model: torch.nn.Module, config: LoraConfig, seed: int) -> torch.nn.Module:
    """Wrap the model; the adapter's first weights depend on the seed alone.

    Under Stage3 the object that load_base keeps alive must still be: by it peft knows that weights have to be gathered where
    it reads them (DoRA's first magnitudes, layers trained whole). Raises ConfigError naming what is available.
    """
    peft = import_peft()
    check_targets(model, config)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # With tied embeddings, a trained copy of the one leaves the other as it was. So does the adapter where it is loaded.
        warnings.filterwarnings("ignore", message=TIED_WARNING)
        # autocast_adapter_dtype would keep the adapter in FP32 under Stage3 but not under Stage2; masters are FP32 in both anyway.
        try:
            wrapped: torch.nn.Module = peft.get_peft_model(model, peft_config(model, config), autocast_adapter_dtype=False)
        except Exception as error:  # also of kinds of its own: whatever a setting and a model lead to
            raise refusal(f"training.lora: peft can't give this model such an adapter: {reason_of(error)}", error) from error
    gather_whole_experts(wrapped)
    return wrapped


def gather_whole_experts(model: torch.nn.Module) -> None:
    """Let Stage3 gather a stack of experts and its adapters as one.

    peft nests a wrapper for each adapted parameter and swaps the parameters of the innermost module in every forward pass;
    DeepSpeed, which follows the modules one by one, then meets them in an order that it didn't record, and ends the run.
    """
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = [(name, module) for name, module in model.named_modules() if isinstance(module, ParamWrapper)]
    for name, wrapper in wrappers:
        nested = any(name.startswith(f"{other}.") for other, _ in wrappers)
        if not nested and any(is_sharded(parameter) for parameter in wrapper.parameters()):
            gather_as_one(wrapper)


def peft_config(model: torch.nn.Module, config: LoraConfig) -> Any:
    peft = import_peft()
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        target_parameters=list(config.target_parameters) or None,
        modules_to_save=whole_modules(model, config.modules_to_save) or None,
        use_rslora=config.rank_stabilized,
        use_dora=config.dora,
        exclude_modules=_towers(model, config.target_modules),
        task_type="CAUSAL_LM",
    )


def _towers(model: torch.nn.Module, targets: Sequence[str]) -> str | None:
    """Pattern of all modules that text doesn't pass, where one of them has a target's name, too; None where none has."""
    named = matching_names(targets, (weight.module for weight in model_weights(model) if weight.tower))
    return rf"(?!({'|'.join(map(re.escape, text_parts(model)))})(\.|$)).*" if named else None


_OWNER = re.compile(r"\.(?:lora_|modules_to_save\.)")
_NUMBER = re.compile(r"\.\d+\.")


def adapter_parts(model: torch.nn.Module) -> dict[str, int]:
    """Layer or stack of experts, by the base model's name → elements that peft trains of it."""
    modules = dict(model.named_modules())
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner = _OWNER.split(name)[0]
            stack = getattr(modules.get(owner), "parameter_name", None)  # of peft's wrapper of a parameter, which may stand around another
            part = owner.removeprefix("base_model.model.").replace(".base_layer", "") + (f".{stack}" if stack else "")
            parts[part] = parts.get(part, 0) + math.prod(full_shape(parameter))
    return parts


def difference(named: Mapping[str, int], trained: Mapping[str, int]) -> str:
    """Difference of what peft trains from what `training.lora` names, in words; "" if there is none (pure)."""
    more, less = dict(trained.items() - named.items()), dict(named.items() - trained.items())
    clauses = [
        f"{verb} {_counted(parts)}" for verb, parts in (("trains", more), ("should train by these names, but doesn't,", less)) if parts
    ]
    return f"training.lora: with this model, peft {' and '.join(clauses)}" if clauses else ""


def _counted(parts: Mapping[str, int]) -> str:
    """Layers with the elements of each, alike ones of all layers together."""
    alike: dict[str, int] = {}
    for part, elements in parts.items():
        pattern = _NUMBER.sub(".*.", part)
        alike[pattern] = alike.get(pattern, 0) + elements
    return listed([f"{pattern} ({elements:,} elements)" for pattern, elements in sorted(alike.items())])


def adapter_description(model: torch.nn.Module) -> dict[str, Any]:
    """adapter_config.json as peft writes it, as a plain JSON object."""
    config: dict[str, Any] = model.peft_config["default"].to_dict()  # type: ignore[index,union-attr]
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()} | {"inference_mode": True}


def adapter_names(model: torch.nn.Module) -> dict[str, str]:
    """Trainable parameter → tensor name in adapter_model.safetensors, as peft itself names it.

    peft is given the model's own parameter objects and asked what it would write; so its rules for layers trained whole, DoRA's
    magnitudes and nested experts hold here, whatever they are. Raises ValueError when it would leave out one that is trained.
    """
    from peft import get_peft_model_state_dict

    parameters = dict(model.named_parameters(remove_duplicate=False))
    written = get_peft_model_state_dict(model, state_dict=parameters, save_embedding_layers=False)
    files = {id(parameter): name for name, parameter in written.items()}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    lost = [name for name, parameter in trained if id(parameter) not in files]
    if lost:
        raise ValueError(f"peft would not write {', '.join(lost)}, which is trained")
    return {name: files[id(parameter)] for name, parameter in trained}


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
        shapes = {names[name]: full_shape(item) for name, item in parameters.items()}
        differences = tensor_differences({name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes)
    if differences:
        raise ConfigError(
            f"training.lora.initFrom {folder} doesn't fit this run: {'; '.join(differences)}; set training.lora to what it was trained"
            " with, or leave initFrom out"
        )
    for name, parameter in parameters.items():
        set_values(parameter, tensors[names[name]])


def read_description(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json. Raises ConfigError when the folder has none that can be read."""
    try:
        description = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(
            f"training.lora.initFrom {folder} has no readable {ADAPTER_CONFIG} ({error}); it must be the folder of a PEFT adapter", error
        ) from error
    if not isinstance(description, dict):
        raise ConfigError(
            f"training.lora.initFrom {folder}: {ADAPTER_CONFIG} is not a JSON object; it must be the folder of a PEFT adapter"
        )
    return description


def description_differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Differences of the adapter from this run, in words (pure). Targets given as a pattern are left to the tensors' names."""
    differences = [
        f"its {word} is {_say(theirs[key])}, not {_say(mine[key])}"
        for key, word in WORDS.items()
        if key in theirs
        and _comparable(theirs[key]) != _comparable(mine[key])
        and not (key in {"target_modules", "modules_to_save"} and isinstance(theirs[key], str))
    ]
    base, mine_base = (Path(model_title(str(value.get("base_model_name_or_path") or ""))).name for value in (theirs, mine))
    if base and mine_base and base != mine_base:
        differences.append(f"its base model is {base}, not {mine_base} (base_model_name_or_path in {ADAPTER_CONFIG})")
    return differences


def tensor_differences(theirs: Mapping[str, tuple[int, ...]], mine: Mapping[str, tuple[int, ...]]) -> list[str]:
    """First tensor that is missing, unknown, or of another shape, in words (pure)."""
    for name in sorted(theirs.keys() ^ mine.keys()):
        return [f"it has no tensor {name}" if name in mine else f"its tensor {name} belongs to no trained layer"]
    for name in sorted(mine):
        if theirs[name] != mine[name]:
            return [f"its tensor {name} has the shape {list(theirs[name])}, not {list(mine[name])}"]
    return []


def _comparable(value: object) -> object:
    """Value for a comparison: order doesn't count in a list, and none is the same as an empty one."""
    return (sorted(map(str, value)) if isinstance(value, list | set | tuple) else value) or None


def _say(value: object) -> str:
    return (", ".join(sorted(map(str, value))) if isinstance(value, list | set | tuple) else json.dumps(value)) or "empty"


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise refusal(
            f"training.lora.initFrom {folder} has no readable {ADAPTER_WEIGHTS} ({error}); save the adapter with safetensors", error
        ) from error


def make_trainable(model: torch.nn.Module, training: TrainingConfig, *, fresh: bool, say: Say = print) -> torch.nn.Module:
    """Give the model its trainable parameters, before the engine. `fresh`: no commit will be loaded, so `initFrom` counts.

    Raises ConfigError for a target or a folder that doesn't fit this model.
    """
    trainable = model if training.method is Method.FULL else _with_adapter(model, training, fresh, say)
    if training.method is Method.FULL:
        text = {weight.name for weight in model_weights(model) if not weight.tower}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in text)
    model.__dict__.pop("sharding", None)  # from here on, a model that transformers makes beside this one is not to be sharded
    return trainable


def _with_adapter(model: torch.nn.Module, training: TrainingConfig, fresh: bool, say: Say) -> torch.nn.Module:
    named = trained_parts(list(model_weights(model)), training.lora)
    wrapped = add_lora(model, training.lora, training.seed)
    if problem := difference(named, adapter_parts(wrapped)):
        if fresh:
            raise ConfigError(f"{problem}; change targetModules, targetParameters and modulesToSave until both are the same")
        say(f"WARNING: {problem}; the run goes on, because its checkpoints were trained so")
    if fresh and training.lora.init_from is not None:
        start_from_adapter(wrapped, Path(training.lora.init_from))
    return wrapped


def describe_trained(model: torch.nn.Module, training: TrainingConfig) -> dict[str, Any]:
    """Describe for a manifest: the method, adapter_config.json (or None), trainable parameter → tensor of the exported file, and the
    elements of all of them.
    """
    trained = {name: math.prod(full_shape(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad}
    described = {"method": training.method.value, "elements": sum(trained.values())}
    if training.method is Method.FULL:
        return {**described, "config": None, "names": {name: name for name in trained}}
    return {**described, "config": adapter_description(model), "names": adapter_names(model)}
