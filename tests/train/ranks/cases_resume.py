"""Rank functions of the tests of resuming, of volumes, and of what follows a commit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from rank_cases import assembled

from lockstep_train import __main__ as trainer
from lockstep_train import loop, steps
from lockstep_train.balance import Shares
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base import volumes
from lockstep_train.checkpoint.format.manifest import decode
from lockstep_train.checkpoint.format.shards import ShardReader
from lockstep_train.checkpoint.save import replicas
from lockstep_train.engine import step as engine_step
from lockstep_train.zero import zero_access


def record_samples(output: str, kill: int | None) -> int:
    """Train, and note which samples this rank takes in which step; be killed at the start of step `kill` on rank 1."""
    real_step, real_batch, real_divide = steps.step_batches, steps.global_batch, Shares.divide
    taken: list[int] = []

    def global_batch(*arguments: Any) -> list[int]:
        taken[:] = real_batch(*arguments)
        return list(taken)

    def divide(self: Shares, lengths: Any, step: int) -> Any:
        division = real_divide(self, lengths, step)
        mine = division.micro_batches[int(os.environ["RANK"])]
        with (Path(output) / f"rank-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps([step, [taken[place] for micro in mine for place in micro]]) + "\n")
        return division

    def step_batches(run: Any, step: int) -> Any:
        if step == kill and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return real_step(run, step)

    steps.step_batches, steps.global_batch, Shares.divide = step_batches, global_batch, divide  # type: ignore[method-assign]
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
    get_accelerator().is_fp16_supported = lambda: True
    return trainer.main([])


def impatient() -> int:
    """Train, but wait one second for a mark on the volume."""
    volumes.nodes_share.__defaults__ = (1.0,)
    return trainer.main([])


def keep_no_copies(node: int) -> int:
    """Train with a node whose volume is full for what its neighbors send."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    if os.environ["GROUP_RANK"] == str(node):
        replicas.receive_file = full
    return trainer.main([])


def evaluate_as(losses: dict[str, float], until: int | None) -> int:
    """Train with evaluations that give these losses, by step, and else 9; and be asked to stop in step `until`."""
    at = {"step": 0}
    real = engine_step.seed_micro_batch

    def seed(seed: int, step: int, micro: int, rank: int) -> None:
        at["step"] = step
        if step == until:
            os.kill(os.getpid(), signal.SIGTERM)
        real(seed, step, micro, rank)

    engine_step.seed_micro_batch = seed
    loop.evaluate = lambda *arguments: losses.get(str(at["step"]), 9.0)
    return trainer.main([])
