"""Balance of a run: the share of a step's tokens that each rank computes, agreed at every start, and anew where one rank holds the others
up.

Rank 0 decides by all ranks' times and publishes them, since ranks that divide a batch differently would lose and repeat samples.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep_spec.choices import Balance, Batches
from lockstep_spec.codec import from_json, to_json
from lockstep_spec.shares import (
    Division,
    RankTime,
    StepTimes,
    divide_by_rows,
    divide_by_tokens,
    expected_shares,
    shares_of,
    shares_text,
    times_as_observed,
)
from lockstep_train.base.ranks import Ranks
from lockstep_train.engine.measure import MeasuredRank, step_times
from lockstep_train.report import Reporter

WATCHED_STEPS = 50
"""Steps after a change before shares are judged, by each rank's median."""
HELD_UP = 1.15
"""Multiple of the ranks' mean time from which on the slowest one gets fewer tokens."""
TURN_SHARE = 0.05
"""Share of a full micro-batch's time that each one costs beside its tokens, where no times are known."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of micro-batches, which no time changes."""

    batches: Batches
    samples: tuple[int, ...]
    """Samples of maxLength tokens that each rank computes at once; with Rows, samples of any length."""
    max_length: int

    def turns(self, batch: int) -> int:
        """Return the micro-batches of a rank for a step of so many samples; with Tokens, at most."""
        return -(-batch // sum(self.samples))

    @property
    def rooms(self) -> tuple[int, ...]:
        """Tokens of each rank's micro-batch at most."""
        return tuple(samples * self.max_length for samples in self.samples)


class Shares:
    """Shares of the ranks from now on. Without `times` they follow from the sizes."""

    def __init__(self, sizes: Sizes, nodes: Sequence[int], times: StepTimes | None = None, *, measured: bool = False) -> None:
        """`nodes`: that of each rank. `times`: as they were measured; None: none are known. `measured`: the shares follow from them, and
        may change during the run.
        """
        self.sizes = sizes
        self.nodes = tuple(nodes)
        self._times = times
        self._measured = measured
        self._watched: deque[Sequence[float]] = deque(maxlen=WATCHED_STEPS)
        self._predicted: deque[Sequence[float]] = deque(maxlen=2)
        """Seconds of each rank by its times, in the last step and in the one before."""

    @property
    def expected(self) -> list[float]:
        """Time that each rank should take for the last step that was divided, as a multiple of the ranks' mean."""
        return expected_shares(self._predicted[-1]) if self._predicted else [1.0] * len(self.nodes)

    def divide(self, lengths: Sequence[int], step: int) -> Division:
        """Divide the samples of a step, given their tokens."""
        sizes = self.sizes
        if sizes.batches is Batches.ROWS:
            division = divide_by_rows(lengths, sizes.samples)
        else:
            times = self._times if self._measured and self._times is not None else _times_by(sizes)
            division = divide_by_tokens(lengths, sizes.rooms, times, first=step)
        if self._times is not None:
            self._predicted.append(division.seconds(self._times))
        return division

    def see(self, seconds: Sequence[float]) -> None:
        """Take each rank's own seconds of the step before the last one that was divided, as the ranks have exchanged them."""
        if self._measured and len(self._predicted) == 2:
            self._watched.append([own / expected for own, expected in zip(seconds, self._predicted[0], strict=True)])

    def proposal(self) -> StepTimes | None:
        """Return times by the watched steps, if one rank has held the others up in them; all ranks compute the same from the same
        numbers.
        """
        if self._times is None or len(self._watched) < WATCHED_STEPS:
            return None
        medians = [statistics.median(column) for column in zip(*self._watched, strict=True)]
        return times_as_observed(self._times, medians) if max(medians) > HELD_UP * statistics.fmean(medians) else None

    def most_rows(self, micro: int) -> int:
        """Return the samples of a padded batch that any rank may get: `micro`, but no more than each may compute at once."""
        return min(micro, *self.sizes.samples)

    def take(self, times: StepTimes) -> None:
        """Go on with times that all ranks take at this moment."""
        self._times = times
        self._watched.clear()
        self._predicted.clear()


def sizes_of(batches: Batches, balance: Balance, micro: int, most: Sequence[int], max_length: int, stated: Sequence[int] = ()) -> Sizes:
    """Return sizes by `most` samples of each rank. With Rows, a rank may have room for more than it takes, unless its node states
    (`stated`; 0 where not) a size.
    """
    measured_rows = batches is Batches.ROWS and balance is Balance.MEASURED
    fixed = stated or (0,) * len(most)
    return Sizes(
        batches, tuple(min(micro, each) if measured_rows and not own else each for each, own in zip(most, fixed, strict=True)), max_length
    )


def _times_by(sizes: Sizes) -> StepTimes:
    """Return times, in no unit, with which each rank gets tokens by the size of its micro-batch."""
    return StepTimes(tuple(RankTime(0.0, 1 / samples) for samples in sizes.samples), TURN_SHARE * sizes.max_length)


def measured_shares(
    first: Shares, micro: int, balance: Balance, measure: Callable[[int], MeasuredRank], ranks: Ranks, reporter: Reporter
) -> Shares:
    """Return shares by measured times; the first ones where nothing depends on time. A collective, and so is `measure(samples)`, which
    times this rank with two samples or `micro`, as far as it has room.

    Ranks of unlike sizes are measured, too: else a slow rank couldn't be told from one with more to do.
    """
    sizes = first.sizes
    measured = balance is Balance.MEASURED and sizes.batches is Batches.TOKENS
    if ranks.world_size == 1 or not (measured or len(set(sizes.samples)) > 1):
        return first
    mine = measure(min(max(2, micro), sizes.samples[ranks.rank]))
    answers = ranks.gather("balance/times", [mine.time.base_seconds, mine.time.token_seconds, mine.waited_seconds])
    answer = None
    if answers is not None:
        answer = to_json(step_times([MeasuredRank(RankTime(base, token), waited) for base, token, waited in answers]))
    times = from_json(StepTimes, ranks.publish("balance/start", answer), "balance")
    shares = shares_of(times if measured else _times_by(sizes))
    reporter.event(
        "balance",
        line=f"Balance: a step's tokens by {'speed' if measured else 'the sizes stated'}: {shares_text(shares)}",
        shares=[round(share, 4) for share in shares],
        mostTokens=list(sizes.rooms),
        tokenSeconds=[float(f"{time.token_seconds:.4g}") for time in times.ranks],
        baseSeconds=[round(time.base_seconds, 6) for time in times.ranks],
        networkSeconds=round(times.network_seconds, 6),
    )
    return Shares(sizes, first.nodes, times, measured=measured)


def renew(shares: Shares, step: int, ranks: Ranks, reporter: Reporter) -> None:
    """Divide anew after `step` if one rank holds the others up: on all ranks alike."""
    proposal = shares.proposal()
    if proposal is None:
        return
    times = from_json(StepTimes, ranks.publish(f"balance/{step}", to_json(proposal)), "balance")
    shares.take(times)
    parts = shares_of(times)
    line = f"Balance after step {step}: a step's tokens by speed: {shares_text(parts)}"
    reporter.event("balance", line=line, step=step, shares=[round(share, 4) for share in parts])
