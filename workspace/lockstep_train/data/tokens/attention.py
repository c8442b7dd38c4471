"""Attention that keeps packed documents apart.

| attention | how it tells documents apart | cost |
|---|---|---|
| flash attention 2 or 3 (CUDA, Ampere or newer, BF16 or FP16, installed) | boundaries given to its varlen kernel; documents of all rows in one list | grows with each document's own length |
| SDPA, elsewhere | a block mask that transformers derives from the positions of each row | a mask of batch × maxLength², and no flash kernel |
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep_spec.choices import Precision
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.limits import Say

AMPERE = (8, 0)
"""The oldest GPUs that flash attention's kernels run on, as a compute capability."""
HALF = {Precision.BF16, Precision.FP16}


def choose_attention(model: Any, training: TrainingConfig, device: torch.device, say: Say) -> None:
    """Set the model's attention with packing, and say which; without packing, transformers' choice stays."""
    if not training.data.packing:
        return
    chosen = varlen_attention() if flash_possible(model, training.precision, device) else None
    if chosen is not None:
        model.set_attn_implementation(chosen)
        say(f"Packing: documents are kept apart by the varlen kernel of {chosen}")
        return
    missing = (
        ""
        if device.type == "cpu"
        else "; flash attention, which needs no mask, is not installed or does not fit this model, GPU and precision"
    )
    say(f"Packing: documents are kept apart by a block mask for {model.config._attn_implementation} attention{missing}")


def flash_possible(model: Any, precision: Precision, device: torch.device) -> bool:
    if device.type != "cuda" or precision not in HALF or not getattr(model, "_supports_flash_attn", False):
        return False
    return torch.cuda.get_device_capability(device) >= AMPERE


def varlen_attention() -> str | None:
    """The best flash attention that is installed."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None
