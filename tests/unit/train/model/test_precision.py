"""A precision that works but is slow here gets a note; an update on CPUs has its part of the cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep_spec.choices import Offload, Precision
from lockstep_spec.training import OptimizationConfig
from lockstep_train.engine.build import precision_note, share_cores

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


AGENTS = {"OMP_NUM_THREADS": "1", "LOCKSTEP_DEFAULT_THREADS": "1"}


@pytest.mark.parametrize(
    ("offload", "environment", "threads"),
    [
        (Offload.CPU, AGENTS, 15),
        (Offload.CPU, {}, 15),
        (Offload.CPU, {"OMP_NUM_THREADS": "1"}, None),
        (Offload.CPU, {**AGENTS, "OMP_NUM_THREADS": "4"}, None),
        (Offload.NONE, AGENTS, None),
    ],
)
def test_an_offloaded_update_runs_on_its_rank_s_part_of_the_cores_unless_the_user_said_how_many(
    monkeypatch: pytest.MonkeyPatch, offload: Offload, environment: dict[str, str], threads: int | None
) -> None:
    chosen: list[int] = []
    for name in AGENTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("lockstep_train.engine.build.usable_cores", lambda: 126)
    share_cores(replace(OptimizationConfig(epochs=1, learning_rate=1e-4, micro_batch_size=1), offload=offload), 8)
    assert chosen == ([threads] if threads else [])
