"""The sizes of a model, as transformers builds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_spec.shape import ModelShape, Weight, shape_of, without_kernel

if TYPE_CHECKING:
    import torch

MEASURED = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt2", "gpt_neox", "llama", "mistral",
        "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2",
    }
)  # fmt: skip
"""model_type of the architectures whose layers keep what the plan counts (tests/train/engine/test_sizes.py)."""
MASKED = frozenset({"falcon"})
"""Architectures, of these, that never leave the mask to attention's kernel."""
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")
"""Names that configurations have for an activation function."""


def read_shape(folder: Path, device: torch.device | None = None) -> ModelShape:
    """Read a model's sizes from config.json alone: it is built without memory. `device`: where it will compute; None: on a GPU.

    Raises what transformers raises for a configuration it doesn't know.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lockstep_train.model.logits import ends_with_layer

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
    caps_logits = type(head) is not torch.nn.Linear or not ends_with_layer(model, head)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    shape = shape_of(
        text,
        tuple(weight for weight in weights if weight.name in own),
        tied=tuple(weight for weight in weights if weight.name not in own),
        caps_logits=caps_logits,
        eager=model.config.get_text_config()._attn_implementation == "eager",
        activation=kept_by_activation(text),
        rotated=rope is not None,
        joined=isinstance(rope, dict) and rope.get("partial_rotary_factor") is not None,
        masked=text.model_type in MASKED,
        unmeasured="" if text.model_type in MEASURED else text.model_type,
    )
    return without_kernel(shape) if device is not None and device.type == "cpu" else shape


def kept_by_activation(config: Any) -> tuple[int, bool]:
    """Number of tensors that autograd keeps of the activation function, and whether its output is one of them. Of an unknown one: its input."""
    import torch
    from transformers.activations import ACT2FN

    name = next((value for key in ACTIVATIONS if isinstance(value := getattr(config, key, None), str)), None)
    if name not in ACT2FN:
        return 1, False
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = ACT2FN[name](torch.empty(1, device="meta", requires_grad=True))
    return len(saved), output.untyped_storage()._cdata in saved
