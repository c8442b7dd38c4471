"""A real training by `lockstep launch` and `lockstep join`: two machines with a folder of their own each, of which one is lost with its
disk.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from support.launched import machines_on_loopback, own_and_descendants, wait_until, write_job

PORT = 17600
TRAINING = {
    "model": {"name": "/workspace/models/tiny"},
    "lora": {"rank": 5, "alpha": 10, "dropout": "0", "targetModules": ["q_proj", "v_proj", "down_proj"]},
    "zeroStage": "Stage2",
    "precision": "FP32",
    "data": {"path": "/datasets/all.jsonl", "maxLength": 64},
    "optimization": {"epochs": 100, "maxSteps": 40, "learningRate": "5e-3", "microBatchSize": 2, "globalBatchSize": 4},
    "checkpoint": {"everySteps": 5, "keep": 2, "replicas": 2},
}


@pytest.mark.long
def test_a_training_on_two_machines_is_complete_though_one_was_lost_with_its_disk(model: Path, data: Path, tmp_path: Path) -> None:
    with machines_on_loopback(tmp_path) as machines:
        for machine in machines:
            shutil.copytree(model, machine.folder / "workspace/models/tiny")
            shutil.copy(data, machine.folder / "datasets/all.jsonl")
        job = write_job(machines[0].folder, training=TRAINING)
        place = f"127.0.0.1:{PORT}"
        first = machines[0].type("launch", "--at", place, "-f", str(job))
        token_file = machines[0].folder / f"state/lockstep/launch/x-{PORT}.token"
        wait_until(token_file.exists, lambda: first.output)
        token = token_file.read_text()
        second = machines[1].type("join", place, given=token)
        wait_until(
            lambda: len(list(machines[0].folder.glob("workspace/runs/x/checkpoints/step-*/manifest.json"))) >= 2, lambda: first.output
        )
        for pid in reversed(own_and_descendants([second.process.pid])):
            os.kill(pid, signal.SIGKILL)
        second.process.wait()
        shutil.rmtree(machines[1].folder / "workspace/runs")
        again = machines[1].type("join", place, given=token)
        assert (first.ends(), again.ends()) == (0, 0), first.output
        assert "Complete: " in first.output
        assert "attempt 2 starts" in first.output
        assert first.output.count("Step 1/40 ") == 1, "it went on from the copies on the other machine"
        assert "Step 40/40" in first.output
        assert (machines[0].folder / "workspace/runs/x/adapter/adapter_model.safetensors").exists()
        why = machines[0].type("why", "x", "--local")
        assert why.ends() == 0
        assert "Complete" in why.output
