"""A tiny model, its data, run files and groups of ranks: what the checks play with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from train_inputs import SHAPES, lockstep_run, make_data, make_model

HERE = Path(__file__).resolve().parent
STEPS = 6
SAMPLES = 64
LIMIT_SECONDS = 240
NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0}
"""Else Stage3 would leave all of so small a model on every rank."""
SHAPE = replace(SHAPES["1m"], sequence=64)


@dataclass(frozen=True)
class Ended:
    codes: list[int]
    output: str


class NotHere(Exception):
    """Reason why this machine can't show something."""

    outcome = "not here"


class Refused(NotHere):
    """Reason why something that may be refused isn't used here."""

    outcome = "refused"


class Scene:
    """Where one suite of checks runs. `device`: cuda or cpu."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        make_model(folder / "model", SHAPE, "cpu")
        make_data(folder / "data.jsonl", SHAPE, SAMPLES)

    def run_file(self, name: str, stage: int = 2, precision: str = "FP32", *, every: int = 1000, job: str | None = None) -> Path:
        """A run of `STEPS` steps whose global batch of four is the same for one rank and for two; in BF16 two samples are joined in a row.
        `job`: the run's folder, to go on in.
        """
        run = lockstep_run(self.folder, SHAPE, precision, 1, STEPS)
        training: dict[str, Any] = run["training"]
        training["zeroStage"] = f"Stage{stage}"
        training["optimization"] |= {"globalBatchSize": 4, "microBatchSize": 2 if precision == "BF16" else 1}
        training["checkpoint"] = {"everySteps": every, "keep": 5, "resumeFrom": "Auto"}
        if stage == 3:
            training["deepspeed"] = {"zero_optimization": NOTHING_RESIDENT}
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({**run, "runDir": str(self.folder / (job or name))}))
        return path

    def start(
        self, run: Path, ranks: int = 1, options: Sequence[str] = (), device: str | None = None, **variables: str
    ) -> list[subprocess.Popen[str]]:
        """All ranks of a run on this machine; on a card, all on the first one."""
        device = device or self.device
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        common = {**os.environ, "LOCKSTEP_RUN": str(run), "DS_ACCELERATOR": device, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", **variables}
        if device == "cpu":
            common["CUDA_VISIBLE_DEVICES"] = ""
        started = []
        for rank in range(ranks):
            log = self.folder / f"{run.stem}-rank-{rank}.log"
            with log.open("a") as writing:
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, str(HERE / "rank.py"), *options]
                started.append(subprocess.Popen(command, env=environment, stdout=writing, stderr=writing, text=True))
        return started

    def wait(self, run: Path, processes: list[subprocess.Popen[str]]) -> Ended:
        """Until all have ended; after the time limit they are killed."""
        deadline = time.monotonic() + LIMIT_SECONDS
        try:
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = []
        finally:
            for process in processes:
                process.kill()
                process.wait()
        output = "\n".join((self.folder / f"{run.stem}-rank-{rank}.log").read_text() for rank in range(len(processes)))
        assert codes, f"{run.stem} took longer than {LIMIT_SECONDS} s:\n{output[-3000:]}"
        return Ended(codes, output)

    def train(self, run: Path, ranks: int = 1, options: Sequence[str] = (), device: str | None = None, **variables: str) -> Ended:
        return self.wait(run, self.start(run, ranks, options, device, **variables))

    def losses(self, name: str) -> list[float]:
        """By step. A step that was taken again after a stop counts once."""
        lines = (self.folder / name / "logs" / "train_log.jsonl").read_text().splitlines()
        by_step = {record["step"]: record["loss"] for record in map(json.loads, lines)}
        return [by_step[step] for step in sorted(by_step)]

    def commits(self, name: str) -> list[int]:
        """Steps of whole commits."""
        manifests = (self.folder / name / "checkpoints").glob("step-*/manifest.json")
        return sorted(json.loads(path.read_text())["step"] for path in manifests)


def stop(processes: list[subprocess.Popen[str]]) -> None:
    """As the kubelet asks."""
    for process in processes:
        process.send_signal(signal.SIGTERM)


def whole(ended: Ended, name: str) -> None:
    assert set(ended.codes) == {0}, f"{name} ended with {ended.codes}:\n{ended.output[-4000:]}"
