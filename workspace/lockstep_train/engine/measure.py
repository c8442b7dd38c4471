"""Times of micro-batches on this rank, measured before the first step. Nothing is learned: every loss is multiplied by 0, so that all
gradients are exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep_spec.choices import Batches
from lockstep_spec.shares import RankTime, StepTimes
from lockstep_train.base.ranks import Ranks
from lockstep_train.data.sequences.batches import Batch, collate
from lockstep_train.data.tokens.encode import Example
from lockstep_train.engine.clock import Clock, Waits
from lockstep_train.engine.loss import TokenLoss, targets
from lockstep_train.zero import zero_access

TIMED_PASSES = 3
"""Passes of each size, of which the least time counts: whatever else the machine does only makes one longer."""
NO_BOUNDARY = 1 << 30
"""Micro-batches a step while times are measured: no update is due."""
SHORTEST_SECONDS = 1e-9
"""Least time of a token: a clock's noise must not make tokens free."""


@dataclass(frozen=True)
class Pass:
    """Time of a forward and a backward pass."""

    own_seconds: float
    waited_seconds: float
    """Seconds in collectives: for the other ranks and for the network."""


@dataclass(frozen=True)
class MeasuredRank:
    """Times of one rank."""

    time: RankTime
    waited_seconds: float
    """Least wait of a micro-batch. On the slowest rank it is the network's alone."""


def measure_rank(engine: Any, loss: TokenLoss, example: Example, pad: int, samples: int, ranks: Ranks, batches: Batches) -> MeasuredRank:
    """Measure micro-batches of `samples` and of one sample. `example`: the same on every rank, so that times compare.

    Each size has a pass that isn't timed, in which kernels are loaded and memory is taken. All ranks run equally many passes, as Stage3
    needs. The caller sets the engine's counters afterwards.
    """
    zero_access.set_counters(engine, 0, NO_BOUNDARY, 1)
    clock, waits = Clock(ranks.device), Waits(ranks.device)
    waits.install()
    timed = [collate([example] * size, example, pad, ranks.device, batches) for size in (samples, 1)]
    for batch in timed:
        time_pass(engine, loss, batch, clock, waits)
    passes = [[time_pass(engine, loss, batch, clock, waits) for batch in timed] for _ in range(TIMED_PASSES)]
    large, one = (min(each.own_seconds for each in column) for column in zip(*passes, strict=True))
    return MeasuredRank(rank_time(one, large, samples, len(example.ids)), min(each.waited_seconds for turn in passes for each in turn))


def time_pass(engine: Any, loss: TokenLoss, batch: Batch, clock: Clock, waits: Waits) -> Pass:
    clock.start()
    waits.begin()
    engine.backward(loss(batch, targets(batch.labels)) * 0.0, scale_wrt_gas=False)
    engine.step()  # never at the boundary: only counts
    taken = waits.taken()
    clock.lap("backward")
    whole = clock.seconds()["backward"]
    return Pass(max(0.0, whole - taken.seconds), taken.seconds)


def rank_time(one_seconds: float, large_seconds: float, samples: int, tokens: int) -> RankTime:
    """Line through the times of 1 and of `samples` samples of so many tokens, neither falling nor below 0 at none (pure)."""
    if samples == 1:
        return RankTime(0.0, max(SHORTEST_SECONDS, one_seconds / tokens))
    each = min((large_seconds - one_seconds) / (samples - 1), large_seconds / samples) / tokens
    each = max(SHORTEST_SECONDS, each)
    return RankTime(max(0.0, large_seconds - samples * tokens * each), each)


def step_times(measured: Sequence[MeasuredRank]) -> StepTimes:
    """Times of all ranks, and the network's: the rank that waits least waits for nobody else (pure)."""
    return StepTimes(tuple(one.time for one in measured), min(one.waited_seconds for one in measured))
