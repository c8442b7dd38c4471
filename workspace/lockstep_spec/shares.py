"""Division of a step's samples over ranks and micro-batches (pure).

Every rank computes the same number of micro-batches, since each may be a collective. A step's loss is a sum over tokens, so any division
gives the same update. Which samples a step has follows from the cursor alone: any step may be divided anew, and a checkpoint knows nothing
of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from statistics import fmean

PATIENCE = 3
"""Numbers of micro-batches that are tried beyond the best one, where ranks are unlike."""


@dataclass(frozen=True)
class RankTime:
    """Time of a rank's micro-batch, forward and backward, without what it waits for others."""

    base_seconds: float
    token_seconds: float
    """Above 0."""

    def seconds(self, tokens: int) -> float:
        return self.base_seconds + self.token_seconds * tokens


@dataclass(frozen=True)
class StepTimes:
    """Times from which a step's time follows."""

    ranks: tuple[RankTime, ...]
    network_seconds: float = 0.0
    """Seconds of a micro-batch's collectives, for which all ranks wait."""


MicroBatch = tuple[int, ...]
"""Places in the step's list of samples; () computes the shortest of them, of which nothing counts."""


@dataclass(frozen=True)
class Division:
    """Micro-batches of a step: by rank, then by turn. All ranks have equally many."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    """Tokens that each computes, with padding."""

    def seconds(self, times: StepTimes) -> list[float]:
        """Own seconds of the step, by rank."""
        return [sum(map(time.seconds, turns)) for time, turns in zip(times.ranks, self.tokens, strict=True)]


def divide_by_rows(lengths: Sequence[int], sizes: Sequence[int]) -> Division:
    """Give each rank so many samples a turn, in their order, as rows that are padded to the longest of them."""
    starts = list(accumulate(sizes, initial=0))
    turns = range(0, max(1, len(lengths)), starts[-1])
    places = range(len(lengths))
    ranks = [[tuple(places[turn + first : turn + end]) for turn in turns] for first, end in pairwise(starts)]
    return _division(ranks, lambda rows: len(rows) * max(lengths[place] for place in rows), min(lengths))


def divide_by_tokens(lengths: Sequence[int], rooms: Sequence[int], times: StepTimes, first: int = 0) -> Division:
    """Give each rank the tokens that it computes in the time of the others, in few micro-batches of at most rooms[rank] tokens.

    The longest sample goes first, each to the micro-batch that ends soonest with it. There are never more micro-batches than by rows of as
    many samples as a room has for the longest ones, unless ranks are unlike, and more make a shorter step. `first`: rank that gets the
    longest of equal choices; another one each step, so that none is always a little slower. Every sample must fit into each room.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    ranks = [(rank + first) % len(rooms) for rank in range(len(rooms))]
    kinds: dict[tuple[RankTime, int], list[int]] = {}
    for rank in ranks:
        kinds.setdefault((times.ranks[rank], rooms[rank]), []).append(rank)
    turns, best, best_seconds, worse = max(1, -(-sum(lengths) // sum(rooms))), None, 0.0, 0
    while worse < PATIENCE and (best is None or turns <= len(lengths)):
        bins = _filled(order, lengths, kinds, turns)
        if bins is not None:
            division = _division(
                [[tuple(sorted(bins[rank, turn])) for turn in range(turns)] for rank in range(len(rooms))],
                lambda micro: sum(lengths[place] for place in micro),
                min(lengths),
            )
            seconds = turns * times.network_seconds + max(division.seconds(times))
            if len(kinds) == 1:
                return division
            best, best_seconds, worse = (
                (division, seconds, 0) if best is None or seconds < best_seconds else (best, best_seconds, worse + 1)
            )
        turns += 1
    assert best is not None  # noqa: S101 (each sample fits into a micro-batch of its own)
    return best


def _filled(
    order: Iterable[int], lengths: Sequence[int], kinds: dict[tuple[RankTime, int], list[int]], turns: int
) -> dict[tuple[int, int], list[int]] | None:
    """(rank, turn) → samples; None if so many turns have no room for them. Of equal micro-batches a rank's first one is filled first."""
    bins: dict[tuple[int, int], list[int]] = {(rank, turn): [] for ranks in kinds.values() for rank in ranks for turn in range(turns)}
    heaps = [
        (time, room, [(0, turn, number, rank) for turn in range(turns) for number, rank in enumerate(ranks)])
        for (time, room), ranks in kinds.items()
    ]
    for place in order:
        able = [
            (time.seconds(heap[0][0] + lengths[place]), kind)
            for kind, (time, room, heap) in enumerate(heaps)
            if heap[0][0] + lengths[place] <= room
        ]
        if not able:
            return None
        heap = heaps[min(able)[1]][2]
        tokens, turn, number, rank = heap[0]
        heapq.heapreplace(heap, (tokens + lengths[place], turn, number, rank))
        bins[rank, turn].append(place)
    return bins


def _division(ranks: Sequence[Sequence[MicroBatch]], tokens_of: Callable[[MicroBatch], int], ghost: int) -> Division:
    return Division(tuple(map(tuple, ranks)), tuple(tuple(tokens_of(micro) if micro else ghost for micro in turns) for turns in ranks))


def idle_words(sizes: Sequence[int], batch: int) -> str:
    """Return a sentence if ranks have no sample of a full step, though they are to have some; '' if all have. `sizes`: samples of each
    rank's micro-batch.
    """
    ranks = len(sizes)
    idle = sum(size > 0 and end - size >= batch for size, end in zip(sizes, accumulate(sizes), strict=True))
    if not idle:
        return ""
    smaller = f", a microBatchSize of {batch // ranks}" if batch >= ranks else ""
    return (
        f"a step's {batch} samples are not enough for all ranks: {idle} of {ranks} have nothing to do in any step. "
        f"State a globalBatchSize of {sum(sizes)} or more{smaller}, or use fewer ranks"
    )


def times_as_observed(times: StepTimes, factors: Sequence[float]) -> StepTimes:
    """Return the times of ranks that took so many times as long as these say."""
    ranks = [RankTime(time.base_seconds * factor, time.token_seconds * factor) for time, factor in zip(times.ranks, factors, strict=True)]
    return replace(times, ranks=tuple(ranks))


def shares_of(times: StepTimes) -> list[float]:
    """Share of a step's tokens that each rank has by its speed."""
    speeds = [1 / time.token_seconds for time in times.ranks]
    return [speed / sum(speeds) for speed in speeds]


def expected_shares(seconds: Sequence[float]) -> list[float]:
    """Return the shares as multiples of their mean."""
    mean = fmean(seconds)
    return [each / mean for each in seconds]


def shares_text(shares: Sequence[float]) -> str:
    """Return words for shares: `50 % on rank 0, 25 % on ranks 1-2`."""
    words, first = [], 0
    for percent, group in groupby(round(100 * share) for share in shares):
        last = first + len(list(group)) - 1
        words.append(f"{percent} % on rank {first}" if first == last else f"{percent} % on ranks {first}-{last}")
        first = last + 1
    return ", ".join(words)
