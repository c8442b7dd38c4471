"""Dtypes that each training.precision computes in."""

from __future__ import annotations

import torch

from lockstep_spec.choices import Precision

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.FP32: torch.float32}
