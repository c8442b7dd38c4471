"""GPUs of a machine, and the processes that compute on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep_machine import cards
from lockstep_machine.cards import gpu_users
from lockstep_machine.gpus import gpu_devices
from lockstep_machine.readings import user_name


def test_gpus_are_counted_by_their_devices(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    assert gpu_devices(tmp_path) == 3 and gpu_devices(tmp_path / "none") == 0


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an nvidia-smi on the PATH that does this."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_who_computes_on_a_gpu_is_what_the_driver_says_and_whose_process_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, f"echo 'GPU-a, {os.getpid()}, 1024'\necho 'GPU-a, 4194304, [N/A]'\necho 'No running processes found'")
    users, problem = gpu_users(10.0)
    mine, gone = users["GPU-a"]
    assert (mine["pid"], mine["user"], mine["bytes"], problem) == (os.getpid(), user_name(), 1 << 30, "") and mine["name"]
    assert gone == {"pid": 4194304, "name": "", "user": ""}


def test_of_the_processes_on_gpus_64_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["GPU-a", str(4194304 + number), "1"] for number in range(70)]
    monkeypatch.setattr(cards, "smi_rows", lambda *_: (rows, ""))
    assert len(gpu_users(10.0)[0]["GPU-a"]) == 64
