"""Packed base weights: 4-bit NormalFloat by bitsandbytes, under a LoRA adapter."""

from __future__ import annotations

from typing import Any

import torch

from lockstep_spec.choices import Quantization
from lockstep_spec.shape import NF4_BLOCK, ModelShape
from lockstep_train.base.errors import ConfigError


def check_blocks(shape: ModelShape, quantization: Quantization, device: torch.device) -> None:
    """Raise ConfigError where a CPU would unpack NF4 with wrong scales.

    bitsandbytes packs a weight as one flat row of blocks, but its AVX-512 code unpacks it row by row and takes every row for whole blocks
    (https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2072 has both). Refused on every CPU: a job may start again on another
    one.
    """
    if quantization is Quantization.NF4 and device.type == "cpu" and shape.ragged:
        weight = shape.ragged[0]
        raise ConfigError(
            f"training.model.quantization is NF4, but {weight.module} of this model has {weight.shape[1]} inputs, and on a CPU NF4 needs a"
            f" multiple of {NF4_BLOCK}; leave quantization out, or train on a GPU"
        )


def keep_trainable(model: torch.nn.Module) -> None:
    """Keep NF4 layers in the format that has a gradient.

    On a CPU with AVX512-BF16, bitsandbytes rewrites a layer in its first evaluation, for inference: scales in BF16, 32 outputs at a time,
    and from then on no gradient for the layer's input, in training either (`matmul_4bit` of bitsandbytes 0.50 says so).
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def loading_options(quantization: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """Options that from_pretrained gets besides; nothing for weights as they are. They are packed on this rank's device as they are read.

    NF4 with double quantization: the scales are packed too, 0.37 bits a weight less for nothing measurable (QLoRA, section 3).
    """
    if quantization is Quantization.NONE:
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config}
