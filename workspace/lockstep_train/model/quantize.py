"""Packed base weights: 4-bit NormalFloat or 8-bit integers by bitsandbytes, under a LoRA adapter."""

from __future__ import annotations

import logging
from typing import Any

import torch

from lockstep_sizes.choices import Method, Quantization, ZeroStage
from lockstep_train.config import TrainingConfig
from lockstep_train.errors import ConfigError


def check_quantization(training: TrainingConfig) -> None:
    """Raises ConfigError where packed weights can't be trained on: in shards, or themselves."""
    quantization = training.model.quantization
    if quantization is Quantization.NONE:
        return
    if training.zero_stage is ZeroStage.STAGE3:
        raise ConfigError(
            f"training.model.quantization {quantization.value} can't be used with zeroStage Stage3, which would cut the packed weights into shards "
            "apart from the scales that unpack them; use Stage1 or Stage2, or leave quantization out"
        )
    if training.method is Method.FULL:
        raise ConfigError(
            f"training.model.quantization {quantization.value} needs method LoRA: packed weights have no gradient; leave quantization out"
        )


def loading_options(quantization: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """What from_pretrained gets besides; nothing for weights as they are. They are packed on this rank's device as they are read.

    NF4 with double quantization: the scales are packed too, 0.37 bits a weight less for nothing measurable (QLoRA, section 3).
    """
    if quantization is Quantization.NONE:
        return {}
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line a layer: Int8 multiplies in FP16
    if quantization is Quantization.INT8:
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    return {"quantization_config": config}
