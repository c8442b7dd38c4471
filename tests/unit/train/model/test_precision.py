"""A precision that works but is slow here gets a note; an update on CPUs has its part of the cores."""

from __future__ import annotations

import pytest
import torch

from lockstep_spec.choices import Precision
from lockstep_train.engine.build import precision_note, thread_words

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


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OMP_NUM_THREADS": "4", "LOCKSTEP_DEFAULT_THREADS": "4"}, "its part of the cores; OMP_NUM_THREADS states another number"),
        ({"OMP_NUM_THREADS": "4"}, "as OMP_NUM_THREADS states"),
        ({}, "its part of the cores; OMP_NUM_THREADS states another number"),
    ],
)
def test_a_rank_on_cpus_says_how_many_threads_it_has_and_what_decided_it(environment: dict[str, str], words: str) -> None:
    assert thread_words(environment, 4) == f"Threads of a rank: 4, {words}"
