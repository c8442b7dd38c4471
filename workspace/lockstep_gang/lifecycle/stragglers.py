"""Ranks that hold the others up (pure).

The wall time of a step says nothing: all ranks wait for the slowest. Each rank tells its own time (Pace), without the waiting. A rank
straggles when it takes clearly longer than the others over a window of samples, and in nearly all of them: one hiccup moves neither.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

from lockstep_gang.contract.messages import Pace
from lockstep_gang.contract.report import Straggler
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.fabric.state import JUDGED_AT_ONCE
from lockstep_gang.lifecycle.gang import Gang
from lockstep_spec.words import LISTED

WINDOW = 30
"""Samples of a rank that count; one is sent every 2 s, or every step if steps are longer."""
ENOUGH = 20
"""Samples of every rank before any is judged."""
SLOW = 1.25
"""Multiple of the others' time from which on a rank straggles;"""
RECOVERED = 1.12
"""below which it doesn't any more."""
MOSTLY = 0.8
"""Share of its samples that are above the others' time by"""
ABOVE = 1.1
SAID_ANEW = 1.15
"""Factor by which a slowdown changes until it is reported anew: status isn't written for a digit."""


def with_sample(paces: tuple[Pace, ...], pace: Pace) -> tuple[Pace, ...]:
    return (*paces, pace)[-WINDOW:]


def with_stragglers_now_and_then(gang: Gang, run: Run, now: float) -> Gang:
    """The gang as `with_stragglers` returns it, when rank 0 reports its pace, so that the work doesn't grow with the square of the ranks;
    in a big gang less often.
    """
    if now < gang.straggled_at + max(0, run.world_size - JUDGED_AT_ONCE) / 1000:
        return gang
    return replace(with_stragglers(gang, run), straggled_at=now)


def with_stragglers(gang: Gang, run: Run) -> Gang:
    """The gang with its stragglers."""
    return replace(gang, stragglers=_stragglers(gang, run))


def _stragglers(gang: Gang, run: Run) -> tuple[Straggler, ...]:
    paces = {index: rank.paces for index, rank in enumerate(gang.ranks) if rank.paces}
    if len(paces) < 2 or min(len(samples) for samples in paces.values()) < ENOUGH:
        return ()
    before = {straggler.rank: straggler for straggler in gang.stragglers}
    medians = {rank: statistics.median(sample.microseconds for sample in samples) for rank, samples in paces.items()}
    others = _others(medians)
    slow = [(medians[rank] / others[rank], rank) for rank in paces if _is_slow(paces[rank], medians[rank], others[rank], rank in before)]
    return tuple(_named(run, rank, ratio, paces[rank], before.get(rank)) for ratio, rank in sorted(slow, reverse=True)[:LISTED])


def _others(medians: Mapping[int, float]) -> dict[int, float]:
    """Median of all others, for each rank."""
    ordered = sorted(medians.values())
    return {rank: max(1.0, _median_without(ordered, value)) for rank, value in medians.items()}


def _median_without(ordered: list[float], value: float) -> float:
    """Median of sorted values without one of them, in constant time after the search."""
    place, left = bisect_left(ordered, value), len(ordered) - 1
    at = [index if index < place else index + 1 for index in ((left - 1) // 2, left // 2)]
    return (ordered[at[0]] + ordered[at[1]]) / 2


def _is_slow(samples: tuple[Pace, ...], median: float, others: float, straggled: bool) -> bool:
    if straggled:
        return median >= RECOVERED * others
    above = sum(sample.microseconds > ABOVE * others for sample in samples)
    return median >= SLOW * others and above >= MOSTLY * len(samples)


def _named(run: Run, rank: int, ratio: float, samples: tuple[Pace, ...], before: Straggler | None) -> Straggler:
    if before is not None and 1 / SAID_ANEW < ratio / float(before.slowdown) < SAID_ANEW:
        return before
    return Straggler(rank, run.node_of(rank), f"{ratio:.2f}", sum(sample.steps for sample in samples))


def straggler_text(straggler: Straggler) -> str:
    return (
        f"rank {straggler.rank} on node {straggler.node} is slow: its own work takes {straggler.slowdown} times as long as that of the"
        f" others, over {straggler.steps} steps, and all ranks wait for it"
    )
