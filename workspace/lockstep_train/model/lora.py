"""LoRA by peft: the adapter's layers, what adapter_config.json says of them, and their names in the adapter's file."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lockstep_train.base.config import LoraConfig
from lockstep_train.base.imports import import_peft
from lockstep_train.model.targets import check_targets, whole_modules

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
        wrapped: torch.nn.Module = peft.get_peft_model(model, peft_config(model, config), autocast_adapter_dtype=False)
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
        if not nested and any(hasattr(parameter, "ds_id") for parameter in wrapper.parameters()):
            from deepspeed.utils import set_z3_leaf_module

            set_z3_leaf_module(wrapper, True)


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
        task_type="CAUSAL_LM",
    )


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
