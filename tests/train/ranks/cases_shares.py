"""Ranks that are unlike: in speed, in memory, or in the shares that they are given."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import add_result, assembled, set_constants

from lockstep_spec.shares import split_by
from lockstep_train import __main__ as trainer
from lockstep_train import balance, steps
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.engine import clock
from lockstep_train.engine.loss import TokenLoss
from lockstep_train.memory import agree
from lockstep_train.report import agent
from lockstep_train.steps import Steps
from lockstep_train.watch.watchdog import StopSignal
from lockstep_train.zero import zero_access

RANK = "RANK"


def first_step_by_any_shares(output: str, shares: list[tuple[int, list[int]]]) -> None:
    """Loss, gradient norm and samples of the first step, again and again without an update, by equal shares and by others.

    `shares`: samples of the step and the sizes of the ranks' micro-batches.
    """
    run = assembled()
    steps.learning_rate = lambda *arguments: 0.0
    taken: list[int] = []
    real = steps.rank_micro_batches

    def recorded(*arguments: Any) -> list[list[int]]:
        mine = real(*arguments)
        taken[:] = [index for micro in mine for index in micro]
        return mine

    steps.rank_micro_batches = recorded
    for batch, sizes in shares:
        results = []
        for chosen in ([-(-batch // len(sizes))] * len(sizes), sizes):
            shared = replace(run, plan=replace(run.plan, global_batch_size=batch))
            shared.shares.split = split_by(chosen, batch)
            zero_access.set_counters(run.engine, 0, shared.shares.split.turns, batch)
            result = Steps(shared, StopSignal()).take(1)
            every: list[Any] = [None] * len(sizes)
            dist.all_gather_object(every, list(taken))
            results.append([result.loss, result.gradient_norm, sorted(index for samples in every for index in samples)])
        if run.ranks.first:
            add_result(output, f"{batch} by {sizes}", results)
    engine_ranks.leave()


class OwnTime:
    """Clock of this rank, by which other programs on its core take no time: it goes on while the rank computes, sleeps and waits for other ranks."""

    def __init__(self) -> None:
        self._beside_seconds = 0.0

    def perf_counter(self) -> float:
        return time.thread_time() + self._beside_seconds

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self._beside_seconds += seconds

    def install(self) -> None:
        """Have the trainer measure by this clock."""
        real = dist.Work.wait

        def wait(work: Any, *arguments: Any) -> Any:
            before = time.perf_counter()
            try:
                return real(work, *arguments)
            finally:
                self._beside_seconds += time.perf_counter() - before

        dist.Work.wait, clock.time = wait, self  # type: ignore[assignment, method-assign]


def slow_samples(own: OwnTime, seconds: dict[str, float], later: dict[str, float] | None = None, after: int = 0) -> None:
    """Let each rank take so many seconds more for each sample it computes; from step `after` + 1 on as `later` says."""
    real, step_of = TokenLoss.__call__, [0]
    take = Steps.take

    def counted(self: Steps, step: int) -> Any:
        step_of[0] = step
        return take(self, step)

    def slow(self: TokenLoss, batch: Any, *arguments: Any) -> torch.Tensor:
        now = later if later is not None and step_of[0] > after else seconds
        own.sleep(now[os.environ[RANK]] * len(batch.ids))
        return real(self, batch, *arguments)

    Steps.take, TokenLoss.__call__ = counted, slow  # type: ignore[method-assign]


def train_unlike(
    seconds: dict[str, float],
    later: dict[str, float] | None = None,
    after: int = 0,
    watched: int = 50,
    bytes_of: dict[str, int] | None = None,
    pace_seconds: float = 2.0,
) -> int:
    """Train on ranks of unlike speed, and with `bytes_of` of unlike memory."""
    set_constants({"balance.WATCHED_STEPS": watched})
    agent.PACE_SECONDS = pace_seconds
    if bytes_of is not None:
        agree.device_bytes = lambda *arguments: bytes_of[os.environ[RANK]]
    own = OwnTime()
    own.install()
    slow_samples(own, seconds, later, after)
    return trainer.main([])


def measure_and_keep() -> int:
    """Train with equal shares after the ranks' times were measured."""
    balance.better_split = lambda present, *arguments: present
    return trainer.main([])
