"""A precision that works but is slow here is told."""

from __future__ import annotations

import pytest
import torch

from lockstep_sizes.choices import Precision
from lockstep_train.engine.start import precision_note

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "device", "instructions", "machine", "told"),
    [
        (Precision.BF16, CPU, False, "x86_64", True),
        (Precision.BF16, CPU, True, "x86_64", False),
        (Precision.BF16, CPU, False, "aarch64", False),
        (Precision.FP32, CPU, False, "x86_64", False),
        (Precision.BF16, torch.device("cuda", 0), False, "x86_64", False),
    ],
)
def test_bf16_on_a_cpu_without_instructions_for_it_is_told(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, device: torch.device, instructions: bool, machine: str, told: bool
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert (precision_note(precision, device) is not None) is told
