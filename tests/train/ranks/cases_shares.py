"""Steps that are divided by rows or by tokens, and ranks that are unlike: in speed, in memory, or in the shares that they are given."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from cases_models import NotSaving, make_family, settings
from rank_cases import add_result, assembled, set_constants

from lockstep_spec.choices import Balance, Batches, NonFinitePolicy
from lockstep_spec.settings import size_settings
from lockstep_spec.shares import Division
from lockstep_train import __main__ as trainer
from lockstep_train import assemble, steps
from lockstep_train.balance import Shares, Sizes, sizes_of
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.limits import UNWATCHED
from lockstep_train.base.runfile import rank_environment
from lockstep_train.data.sequences.batches import collate
from lockstep_train.data.tokens.encode import IGNORED, Example
from lockstep_train.engine import clock
from lockstep_train.engine.build import start_model
from lockstep_train.engine.clock import Clock
from lockstep_train.engine.loss import TokenLoss
from lockstep_train.engine.step import Stepper
from lockstep_train.memory import agree
from lockstep_train.model.isolation import settle_batches
from lockstep_train.model.load import quiet_transformers
from lockstep_train.report import Reporter, agent
from lockstep_train.steps import Steps
from lockstep_train.watch.watchdog import StopSignal
from lockstep_train.zero import zero_access

RANK = "RANK"


def first_step_by_any_shares(output: str, shares: list[tuple[int, list[int]]]) -> None:
    """Loss, gradient norm and samples of the first step, again and again without an update, by rows and by tokens, by equal shares and by
    others.

    `shares`: samples of the step and the sizes of the ranks' micro-batches.
    """
    run = assembled()
    steps.learning_rate = lambda *arguments: 0.0
    taken: list[int] = []
    real = Shares.divide

    def recorded(self: Shares, *arguments: Any) -> Division:
        division = real(self, *arguments)
        taken[:] = [place for micro in division.micro_batches[run.ranks.rank] for place in micro]
        return division

    Shares.divide = recorded  # type: ignore[method-assign]
    for batch, sizes in shares:
        results = []
        for batches, chosen in itertools.product(Batches, ([-(-batch // len(sizes))] * len(sizes), sizes)):
            own = Shares(Sizes(batches, tuple(chosen), run.config.training.data.max_length), run.shares.nodes)
            result = Steps(replace(run, plan=replace(run.plan, global_batch_size=batch), shares=own), StopSignal()).take(1)
            every: list[Any] = [None] * len(sizes)
            dist.all_gather_object(every, list(taken))
            results.append([result.loss, result.gradient_norm, sorted(place for places in every for place in places)])
        if run.ranks.first:
            add_result(output, f"{batch} by {sizes}", results)
    engine_ranks.leave()


class OwnTime:
    """Clock of this rank, by which other programs on its core take no time: it goes on while the rank computes, sleeps and waits for other
    ranks.
    """

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


SAMPLE_TOKENS = 40
"""About as many as a sample of the tests has."""


def slow_samples(own: OwnTime, seconds: dict[str, float], later: dict[str, float] | None = None, after: int = 0) -> None:
    """Let each rank take so many seconds more for each 40 tokens it computes; from step `after` + 1 on as `later` says."""
    real, step_of = TokenLoss.__call__, [0]
    take = Steps.take

    def counted(self: Steps, step: int) -> Any:
        step_of[0] = step
        return take(self, step)

    def slow(self: TokenLoss, batch: Any, *arguments: Any) -> torch.Tensor:
        now = later if later is not None and step_of[0] > after else seconds
        own.sleep(now[os.environ[RANK]] * batch.ids.numel() / SAMPLE_TOKENS)
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
    real = assemble.measured_shares

    def measured(first: Shares, micro: int, *arguments: Any) -> Shares:
        real(first, micro, *arguments)
        return Shares(replace(first.sizes, samples=(micro,) * len(first.nodes)), first.nodes)

    assemble.measured_shares = measured
    return trainer.main([])


STEPS = 10
MICRO, LONGEST = 2, 40


def ragged(step: int) -> list[Example]:
    """Eight samples, one of which in some steps is all there is."""
    draw = numpy.random.default_rng(step)
    examples = []
    for length in draw.integers(3, LONGEST + 1, 1 if step == 4 else 8):
        ids = draw.integers(1, 90, length)
        labels = numpy.where(numpy.arange(length) < length // 3 + 1, IGNORED, ids)
        examples.append(Example(ids, labels, "drawn"))
    return examples


def ten_steps(folder: Path, stage: str, variant: dict[str, Any], batches: Batches, ranks: Any) -> dict[str, Any]:
    training = settings(folder, stage, variant)
    plan: Any = SimpleNamespace(accumulation=1, done=SimpleNamespace(steps=0))
    recomputed = size_settings(training).recomputed
    engine, loss, _ = start_model(training, folder, plan, ranks, Reporter(None, ranks.rank), recomputed, joins=batches is Batches.TOKENS)
    said: list[str] = []
    settled = settle_batches(engine, training, batches, ragged(0), MICRO, ranks.device, said.append)
    stepper = Stepper(engine, loss, ranks, NotSaving(), UNWATCHED, seed=42, policy=NonFinitePolicy.STOP)  # type: ignore[arg-type]
    shares = Shares(sizes_of(settled, Balance.EQUAL, MICRO, (MICRO,) * ranks.world_size, LONGEST), (0,) * ranks.world_size)
    results, computed = [], []
    for step in range(1, STEPS + 1):
        examples = ragged(step)
        division = shares.divide([len(example.ids) for example in examples], step)
        mine = division.micro_batches[ranks.rank]
        parts = [collate([examples[place] for place in micro], examples[0], 0, ranks.device, settled) for micro in mine]
        computed.append([part.ids.numel() for part, micro in zip(parts, mine, strict=True) if micro])
        zero_access.set_counters(engine, step - 1, len(parts), len(examples))
        results.append(stepper.take(step, parts, sum(example.learned_tokens for example in examples), lambda: False, Clock(ranks.device)))
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, computed)
    engine.destroy()
    return {
        "batches": settled.value,
        "said": said,
        "losses": [result.loss for result in results],
        "norm": results[0].gradient_norm,
        "computed": every,
    }


def same_update(folder: str, stage: str, variants: dict[str, Any], output: str) -> None:
    """Train each variant by rows and by tokens in this one group. Rank 0 adds what came out to `output`."""
    quiet_transformers()
    ranks = engine_ranks.join(rank_environment())
    for name, variant in variants.items():
        model = Path(folder) / f"{stage}-{ranks.world_size}" / variant["family"]
        if ranks.first:
            make_family(model, variant["family"])
        dist.barrier()
        result = {batches.value: ten_steps(model, stage, variant, batches, ranks) for batches in Batches}
        if ranks.first:
            add_result(output, name, result)
        dist.barrier()
    engine_ranks.leave()
