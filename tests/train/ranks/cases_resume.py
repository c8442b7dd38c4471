"""Rank functions of the tests of resuming."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from rank_cases import assembled

from lockstep_train import __main__ as trainer
from lockstep_train import steps
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.checkpoint.format.manifest import decode
from lockstep_train.checkpoint.format.shards import ShardReader
from lockstep_train.zero import zero_access


def record_samples(output: str, kill: int | None) -> int:
    """Train, and note which samples this rank takes in which step; be killed at the start of step `kill` on rank 1."""
    real_step, real_share = steps.step_batches, steps.rank_micro_batches
    at = {"step": 0}

    def share(*arguments: Any) -> list[list[int]]:
        mine = real_share(*arguments)
        with (Path(output) / f"rank-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps([at["step"], [index for micro in mine for index in micro]]) + "\n")
        return mine

    def step_batches(run: Any, step: int) -> Any:
        at["step"] = step
        if step == kill and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return real_step(run, step)

    steps.step_batches, steps.rank_micro_batches = step_batches, share
    return trainer.main([])


def started_from_lite(commit: str) -> None:
    """What a Lite commit leaves in an engine: its weights as masters and as weights, an optimizer that has done nothing."""
    run = assembled()
    manifest = decode((Path(commit) / "manifest.json").read_bytes())
    reader = ShardReader(Path(commit), manifest)
    assert manifest.content == "Lite"
    for fragment in zero_access.fragments(run.engine):
        mine = slice(fragment.start, fragment.start + fragment.numel)
        assert torch.equal(fragment.tensors["fp32"], reader.read(fragment.name, "fp32")[mine])
        assert fragment.tensors["fp32"].any()
        assert not fragment.tensors["exp_avg"].any()
        assert not fragment.tensors["exp_avg_sq"].any()
    for name, value in zero_access.gather_masters(run.engine):
        assert torch.equal(value.flatten(), reader.read(name, "fp32"))
    assert zero_access.optimizer_step(run.engine) == 0
    assert run.plan.done.steps == manifest.step == 2
    engine_ranks.leave()


def train_in_fp16() -> int:
    """The trainer on CPU ranks in FP16, which DeepSpeed refuses there though gloo and torch compute in it; loss scale from 2^20, so
    that the first steps overflow and are skipped, or not, by what the scaler remembers."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    return trainer.main([])
