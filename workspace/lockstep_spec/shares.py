"""Split of a step's samples over unlike ranks (pure).

Every rank computes the same number of micro-batches, since each may be a collective; their sizes follow the ranks' speed and memory. A step's loss is a sum over
tokens, so any split gives the same update. Which samples a step has follows from the cursor alone: any step may be split anew, and a checkpoint knows nothing of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from statistics import fmean

WORTH = 0.95
"""Share of a split's time that another one must stay below to replace it: measured times differ by a few percent from one time to the next."""


@dataclass(frozen=True)
class Bounds:
    """Least and most samples that a rank may compute at once; equal where somebody stated the number."""

    least: int
    most: int


@dataclass(frozen=True)
class RankTime:
    """Time of a rank's micro-batch, forward and backward, without what it waits for others."""

    base_seconds: float
    sample_seconds: float
    """Above 0."""

    def seconds(self, samples: int) -> float:
        """Seconds for so many samples. A rank without any computes a ghost, which takes as long as one."""
        return self.base_seconds + self.sample_seconds * max(1, samples)

    def within(self, seconds: float) -> int:
        """Most samples that take no longer; 0 if none do."""
        samples = max(0, int((seconds - self.base_seconds) / self.sample_seconds))
        while self.seconds(samples + 1) <= seconds:
            samples += 1
        while samples > 0 and self.seconds(samples) > seconds:
            samples -= 1
        return samples


@dataclass(frozen=True)
class StepTimes:
    """Times from which a step's time follows."""

    ranks: tuple[RankTime, ...]
    network_seconds: float = 0.0
    """Seconds of a micro-batch's collectives, for which all ranks wait."""


@dataclass(frozen=True)
class Split:
    """Micro-batches of a step."""

    sizes: tuple[int, ...]
    """Samples of a full micro-batch, by rank; one at least is above 0. The step's last ones may be short."""
    turns: int
    """Micro-batches of each rank."""

    @property
    def equal(self) -> bool:
        return len(set(self.sizes)) == 1


def split_by(sizes: Sequence[int], batch: int) -> Split:
    """Split a global batch of so many samples by the ranks' sizes."""
    return Split(tuple(sizes), -(-batch // sum(sizes)))


def idle_words(split: Split, batch: int) -> str:
    """Return a sentence if ranks have no sample of a full step, though they are to have some; '' if all have."""
    ranks = len(split.sizes)
    idle = sum(size > 0 and end - size >= batch for size, end in zip(split.sizes, accumulate(split.sizes), strict=True))
    if not idle:
        return ""
    smaller = f", a microBatchSize of {batch // ranks}" if batch >= ranks else ""
    return (
        f"a step's {batch} samples are not enough for all ranks: {idle} of {ranks} have nothing to do in any step. "
        f"State a globalBatchSize of {sum(split.sizes)} or more{smaller}, or use fewer ranks"
    )


def stated_sizes(bounds: Sequence[Bounds], micro: int) -> list[int]:
    """Micro-batch of each rank before any time is known: `micro`, as far as its bounds allow."""
    return [min(max(micro, bound.least), bound.most) for bound in bounds]


def turn_seconds(split: Split, times: StepTimes) -> list[float]:
    """Own seconds of one full micro-batch, by rank."""
    return [time.seconds(size) for time, size in zip(times.ranks, split.sizes, strict=True)]


def step_seconds(split: Split, times: StepTimes) -> float:
    """Seconds of a step: in every turn all ranks wait for the slowest, and for the network."""
    return split.turns * (max(turn_seconds(split, times)) + times.network_seconds)


def fastest_split(times: StepTimes, bounds: Sequence[Bounds], batch: int) -> Split:
    """Split of least time within the bounds, of which one allows a sample at least.

    For each number of turns the least time of a turn is found by bisection over all times that a turn can take. More turns are tried for as long as even
    the least possible turn, in which each rank computes one sample or its least, could make a shorter step.
    """
    least = max(time.seconds(bound.least) for time, bound in zip(times.ranks, bounds, strict=True))
    mosts = [min(bound.most, max(batch, bound.least)) for bound in bounds]
    possible = sorted(
        {least}
        | {
            seconds
            for time, most in zip(times.ranks, mosts, strict=True)
            for size in range(1, most + 1)
            if (seconds := time.seconds(size)) > least
        }
    )

    def sizes_within(seconds: float) -> list[int]:
        return [max(bound.least, min(most, time.within(seconds))) for time, bound, most in zip(times.ranks, bounds, mosts, strict=True)]

    turns = -(-batch // sum(mosts))
    best: Split | None = None
    while best is None or (turns <= batch and turns * (least + times.network_seconds) < step_seconds(best, times)):
        wanted = -(-batch // turns)
        place = bisect_left(possible, wanted, key=lambda seconds: sum(sizes_within(seconds)))
        sizes = _without_surplus(sizes_within(possible[min(place, len(possible) - 1)]), wanted, times.ranks, bounds)
        split = split_by(sizes, batch)
        if best is None or step_seconds(split, times) < step_seconds(best, times):
            best = split
        turns += 1
    return best


def _without_surplus(sizes: list[int], wanted: int, times: Sequence[RankTime], bounds: Sequence[Bounds]) -> list[int]:
    """Sizes that add up to `wanted`, or to the least: what is too much is taken from those that take longest."""
    while sum(sizes) > wanted:
        able = [rank for rank, bound in enumerate(bounds) if sizes[rank] > bound.least]
        if not able:
            return sizes
        sizes[max(able, key=lambda rank: (times[rank].seconds(sizes[rank]), rank))] -= 1
    return sizes


def better_split(present: Split, times: StepTimes, bounds: Sequence[Bounds], batch: int) -> Split:
    """The fastest split if it is worth a change (WORTH), else the present one."""
    fastest = fastest_split(times, bounds, batch)
    return fastest if step_seconds(fastest, times) < WORTH * step_seconds(present, times) else present


def times_as_observed(times: StepTimes, split: Split, seconds: Sequence[float]) -> StepTimes:
    """Times of ranks that took so many seconds of their own for a step of this split, each by one factor."""
    factors = [own / (split.turns * turn) for own, turn in zip(seconds, turn_seconds(split, times), strict=True)]
    ranks = [RankTime(time.base_seconds * factor, time.sample_seconds * factor) for time, factor in zip(times.ranks, factors, strict=True)]
    return replace(times, ranks=tuple(ranks))


def expected_shares(split: Split, times: StepTimes | None) -> list[float]:
    """Time that each rank's samples should take, as a multiple of the ranks' mean; 1 for all where they have equally many, or no times are known."""
    if split.equal or times is None:
        return [1.0] * len(split.sizes)
    turns = turn_seconds(split, times)
    return [turn / fmean(turns) for turn in turns]


def sizes_text(sizes: Sequence[int]) -> str:
    """Words for them: `6 on rank 0, 3 on ranks 1-2`."""
    words, first = [], 0
    for size, group in groupby(sizes):
        last = first + len(list(group)) - 1
        words.append(f"{size} on rank {first}" if first == last else f"{size} on ranks {first}-{last}")
        first = last + 1
    return ", ".join(words)
