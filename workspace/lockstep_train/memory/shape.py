"""The sizes of a model, as transformers builds it."""

from __future__ import annotations

from pathlib import Path

from lockstep_sizes.shape import ModelShape, Weight, shape_of


def read_shape(folder: Path) -> ModelShape:
    """From config.json alone: the model is built without memory. Raises what transformers raises for a configuration it doesn't know."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lockstep_train.engine.loss import ends_with

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    own = {name for name, _ in model.named_parameters()}
    weights = [
        Weight(name, tuple(parameter.shape), name.endswith(".weight") and name.removesuffix(".weight") in linear)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    head = model.get_output_embeddings()
    caps_logits = type(head) is not torch.nn.Linear or not ends_with(model, head)
    eager = model.config.get_text_config()._attn_implementation == "eager"
    return shape_of(
        config.get_text_config(),
        tuple(weight for weight in weights if weight.name in own),
        tied=tuple(weight for weight in weights if weight.name not in own),
        caps_logits=caps_logits,
        eager=eager,
    )
