"""Ranks that hang, fail or are asked to stop at a chosen moment."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from cases_load import keep_nothing_resident

from lockstep_train import __main__ as trainer
from lockstep_train import assemble as assembling
from lockstep_train import evaluate as evaluating
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
    real = assembling.load_tokenizer

    def slow(*arguments: Any) -> Any:
        if os.environ[RANK] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        return real(*arguments)

    assembling.load_tokenizer = slow
    return trainer.main([])


def terminate_in_evaluation(step: int, rank: int) -> int:
    """One rank is asked to stop before its first batch of the evaluation at `step`."""
    real = loop._evaluate

    def asked(run: Any, at: int, *others: Any) -> str | None:
        if at == step and os.environ[RANK] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, at, *others)

    loop._evaluate = asked
    return trainer.main([])


def terminate_in_evaluation_of_a_node_ahead() -> int:
    """The first node is slow and its rank 0 is asked to stop; the other node, which has all the weights itself, need not wait for it."""
    evaluating.AGREE_SECONDS = 0.05
    rank, real = os.environ[RANK], loop.Leaving.__call__

    def slowly(self: Any, turn: int) -> bool:
        if rank in {"0", "1"}:
            time.sleep(0.02)
        if rank == "0" and turn == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        left = real(self, turn)
        if left:
            print(f"left before turn {turn}", flush=True)
        return left

    loop.Leaving.__call__ = slowly
    keep_nothing_resident()
    return trainer.main([])


def terminate_twice(steps: list[int]) -> int:
    """Every rank at a step of its own, and once more at the one after, if it comes to that."""

    def terminate(at: int) -> None:
        if at in {steps[int(os.environ[RANK])], steps[int(os.environ[RANK])] + 1}:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    before_micro_batch(terminate)
    return trainer.main([])
