"""Ranks that hang, fail or are asked to stop at a chosen moment."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from lockstep_train import __main__ as trainer
from lockstep_train import assemble as assembling
from lockstep_train import loop
from lockstep_train.engine import step as engine_step
from lockstep_train.watch import watchdog

RANK = "RANK"


def before_micro_batch(act: Any) -> None:
    """Call `act(step)` on this rank before the first micro-batch of every step."""
    real = engine_step.seed_micro_batch

    def seed(seed: int, at: int, micro: int, on: int) -> None:
        if micro == 0:
            act(at)
        real(seed, at, micro, on)

    engine_step.seed_micro_batch = seed


def hang(step: int, rank: int) -> int:
    def fall_asleep(at: int) -> None:
        if at == step and os.environ[RANK] == str(rank):
            time.sleep(600)

    before_micro_batch(fall_asleep)
    return trainer.main([])


def fail_while_another_works(step: int) -> int:
    """Rank 1 fails while rank 0 is in no collective, where no broken connection would tell it."""

    def fail(at: int) -> None:
        if at == step and os.environ[RANK] == "1":
            raise ValueError("this rank is broken")
        if at == step:
            time.sleep(600)

    watchdog.GRACE_SECONDS = 1.0
    before_micro_batch(fail)
    return trainer.main([])


def die(step: int) -> int:
    def kill(at: int) -> None:
        if at == step and os.environ[RANK] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    before_micro_batch(kill)
    return trainer.main([])


def terminate_while_loading(rank: int) -> int:
    """One rank is asked to stop while its data is read, which takes very long; the others wait for it."""
    real = assembling.load_tokeniser

    def slow(folder: Any) -> Any:
        if os.environ[RANK] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        return real(folder)

    assembling.load_tokeniser = slow
    return trainer.main([])


def terminate_in_evaluation(step: int, rank: int) -> int:
    """One rank is asked to stop before its first batch of the evaluation at `step`."""
    real = loop.Leaving.__call__

    def asked(self: Any, turn: int) -> bool:
        if self.key.endswith(f"/{step}") and turn == 0 and os.environ[RANK] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, turn)

    loop.Leaving.__call__ = asked
    return trainer.main([])


def terminate_twice(steps: list[int]) -> int:
    """Every rank at a step of its own, and once more at the one after, if it comes to that."""

    def terminate(at: int) -> None:
        if at in {steps[int(os.environ[RANK])], steps[int(os.environ[RANK])] + 1}:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    before_micro_batch(terminate)
    return trainer.main([])
