"""Balance of a run: how many samples each rank computes at once, agreed at every start, and anew where one rank holds the others up.

Rank 0 decides by all ranks' times and publishes the sizes, since ranks that split a batch differently would lose and repeat samples.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep_spec.choices import Balance
from lockstep_spec.codec import from_json, to_json
from lockstep_spec.shares import (
    Bounds,
    RankTime,
    Split,
    StepTimes,
    better_split,
    expected_shares,
    sizes_text,
    split_by,
    stated_sizes,
    times_as_observed,
)
from lockstep_train.base.ranks import Ranks
from lockstep_train.engine.measure import MeasuredRank, step_times
from lockstep_train.memory.agree import Agreed
from lockstep_train.report import Reporter

WATCHED_STEPS = 50
"""Steps after a split before it is judged, by each rank's median."""
HELD_UP = 1.15
"""Multiple of the ranks' mean time from which on the slowest one gets fewer samples."""


@dataclass(frozen=True)
class SplitDecision:
    """Rank 0's decision, and the times that it was made by."""

    split: Split
    times: StepTimes


class Shares:
    """Shares of the ranks from now on. Without `times` they stay as they are."""

    def __init__(
        self,
        split: Split,
        bounds: Sequence[Bounds],
        nodes: Sequence[int],
        batch: int,
        times: StepTimes | None = None,
        *,
        renewed: bool = False,
    ) -> None:
        """`nodes`: that of each rank. `batch`: samples of a step. `times`: as they were measured; None: nobody has measured. `renewed`: the split may change during the run."""
        self.split = split
        self.bounds = tuple(bounds)
        self.nodes = tuple(nodes)
        self._batch = batch
        self._times = times
        self._renewed = renewed
        self._watched: deque[Sequence[float]] = deque(maxlen=WATCHED_STEPS)
        self._before = True
        """The next times are of a step before the split."""

    @property
    def expected(self) -> list[float]:
        """Time that each rank should take for its samples, as a multiple of the ranks' mean."""
        return expected_shares(self.split, self._times)

    def see(self, seconds: Sequence[float]) -> None:
        """Take each rank's own seconds of the step before the last one, as the ranks have exchanged them."""
        if self._before:
            self._before = False
        elif self._renewed:
            self._watched.append(seconds)

    def proposal(self) -> SplitDecision | None:
        """Split by the times of the watched steps, if one rank has held the others up in them; all ranks compute the same from the same numbers."""
        if self._times is None or len(self._watched) < WATCHED_STEPS:
            return None
        medians = [statistics.median(column) for column in zip(*self._watched, strict=True)]
        if max(medians) <= HELD_UP * statistics.fmean(medians):
            return None
        times = times_as_observed(self._times, self.split, medians)
        return SplitDecision(better_split(self.split, times, self.bounds, self._batch), times)

    def most_rows(self, micro: int) -> int:
        """Samples of a batch that any rank may get: `micro`, but no more than each may compute at once."""
        return min(micro, *(bound.most for bound in self.bounds))

    def take(self, decision: SplitDecision) -> None:
        """Go on with a split that all ranks take at this moment."""
        self.split, self._times = decision.split, decision.times
        self._watched.clear()
        self._before = True


def first_shares(memory: Agreed, micro: int, batch: int) -> Shares:
    """Shares before any time is known: equal ones, but where a node's size is stated or its memory has no room."""
    return Shares(split_by(stated_sizes(memory.bounds, micro), batch), memory.bounds, memory.nodes, batch)


def measured_shares(
    first: Shares, batch: int, balance: Balance, measure: Callable[[int], MeasuredRank], ranks: Ranks, reporter: Reporter
) -> Shares:
    """Shares by measured times; the first ones where nothing depends on time. A collective, and so is `measure(samples)`, which times this rank.

    Sizes that are stated and differ are measured, too: else nobody could tell a slow rank from one with more to do.
    """
    if ranks.world_size == 1 or (balance is Balance.EQUAL and first.split.equal):
        return first
    bound, size = first.bounds[ranks.rank], first.split.sizes[ranks.rank]
    mine = measure(min(max(2, size), bound.most))
    answers = ranks.gather("balance/times", [mine.time.base_seconds, mine.time.sample_seconds, mine.waited_seconds])
    answer = None
    if answers is not None:
        times = step_times([MeasuredRank(RankTime(base, sample), waited) for base, sample, waited in answers])
        split = better_split(first.split, times, first.bounds, batch) if balance is Balance.MEASURED else first.split
        answer = to_json(SplitDecision(split, times))
    decision = from_json(SplitDecision, ranks.publish("balance/start", answer), "balance")
    split, times = decision.split, decision.times
    reporter.event(
        "balance",
        line=f"Balance: samples at once: {sizes_text(split.sizes)}; micro-batches a step: {split.turns}",
        sizes=list(split.sizes),
        accumulation=split.turns,
        mostSamples=[bound.most for bound in first.bounds],
        sampleSeconds=[round(time.sample_seconds, 6) for time in times.ranks],
        baseSeconds=[round(time.base_seconds, 6) for time in times.ranks],
        networkSeconds=round(times.network_seconds, 6),
    )
    return Shares(split, first.bounds, first.nodes, batch, times, renewed=balance is Balance.MEASURED)


def renew(shares: Shares, step: int, ranks: Ranks, reporter: Reporter) -> bool:
    """Split anew after `step` if one rank holds the others up. Returns True, on all ranks alike, if the sizes have changed."""
    proposal = shares.proposal()
    if proposal is None:
        return False
    before = shares.split
    shares.take(from_json(SplitDecision, ranks.publish(f"balance/{step}", to_json(proposal)), "balance"))
    split = shares.split
    if split == before:
        return False
    sizes = zip(shares.nodes, before.sizes, split.sizes, strict=True)
    changes = [f"rank {rank} on node {node} {old} → {new}" for rank, (node, old, new) in enumerate(sizes) if old != new]
    reporter.event(
        "balance",
        line=f"Balance after step {step}: samples at once: {', '.join(changes)}; micro-batches a step: {split.turns}",
        step=step,
        sizes=list(split.sizes),
        accumulation=split.turns,
    )
    return True
