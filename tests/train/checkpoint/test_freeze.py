"""A trainer's rank that is stopped from outside, under real agents: not even its own watching thread runs then."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from lockstep_train.watch.watchdog import PERIOD_SECONDS
from train.runs.test_run_local import TIMEOUT_SECONDS, Folder, line_with

LIMIT_SECONDS = 10


def rank_process(rank: int, folder: Path) -> int:
    """The process of this rank of the job in `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            here = (entry / "cwd").readlink().is_relative_to(folder)
            if here and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return min(found)


def trains_for(seconds: float, log: Path) -> None:
    """Until steps have been written for so long: by then every rank has told where it is."""
    began, size = time.monotonic(), log.stat().st_size
    while time.monotonic() - began < seconds or log.stat().st_size == size:
        time.sleep(0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_frozen_rank_is_named_with_what_it_was_in(folder: Folder, model: Path, data: Path, rank: int) -> None:
    """Rank 0 keeps the store in which ranks tell each other where they are: without it they only lose each other."""
    training = {
        "model": {"name": str(model)}, "lora": {"targetModules": ["q_proj", "v_proj"]}, "zeroStage": "Stage2", "precision": "FP32",
        "data": {"path": str(data), "maxLength": 64}, "optimization": {"epochs": 500, "microBatchSize": 1, "globalBatchSize": 2},
        "checkpoint": {"everySteps": 100000},
    }  # fmt: skip
    folder.job(training=training, preflight="None", hangTimeouts={"stepSeconds": LIMIT_SECONDS})
    with folder.running() as process:
        line_with(process, "end of the first step")
        trains_for(2 * PERIOD_SECONDS, folder.root / "workspace/runs/x/logs/train_log.jsonl")
        os.kill(rank_process(rank, folder.root), signal.SIGSTOP)
        line_with(process, f"rank {rank} on node {rank} hangs")
        process.communicate(timeout=TIMEOUT_SECONDS)
    failure = folder.end()["failure"]
    assert (failure["cause"], failure["rank"], failure["node"]) == ("Hang", rank, rank)
    assert failure["activity"].startswith("Step ")
    assert "its process is stopped (state T)" in failure["message"]
    assert "most recent call first" in Path(failure["stacks"]).read_text()
