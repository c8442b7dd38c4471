"""Rank functions of the tests of volumes and of what follows a commit."""

from __future__ import annotations

import os
import signal
from typing import Any

from lockstep_train import __main__ as trainer
from lockstep_train import loop
from lockstep_train.base import volumes
from lockstep_train.checkpoint.save import replicas
from lockstep_train.engine import step as engine_step


def impatient() -> int:
    """Train, but wait one second for a mark on the volume."""
    volumes.nodes_share.__defaults__ = (1.0,)
    return trainer.main([])


def keep_no_copies(node: int) -> int:
    """Train with a node whose volume is full for what its neighbors send."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    if os.environ["GROUP_RANK"] == str(node):
        replicas.Line.receive_file = full
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
