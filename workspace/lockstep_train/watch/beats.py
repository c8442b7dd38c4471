"""Beats by which ranks know of each other while one of them hangs (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Beat:
    """Place and activity of a rank."""

    position: int
    """Places it has come to since it started. All ranks come to the same ones, in the same order."""
    activity: str
    """Activity, such as `Step 12`."""
    place: str
    """Place within it: `forward of micro-batch 1 of 2`; may be empty."""
    seconds: float
    """Seconds that it has been in this activity."""
    number: int
    """Counts this rank's beats: one that doesn't grow is of a process that doesn't run."""

    @property
    def where(self) -> str:
        return f"{self.activity}, {self.place}" if self.place else self.activity


def behind(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> list[int]:
    """Ranks that the others wait for: those furthest back, unless all are at the same place. Two looks, some beats apart."""
    silent = [rank for rank, beat in now.items() if rank in before and before[rank].number == beat.number]
    if silent:
        return silent
    last = min((beat.position for beat in now.values()), default=0)
    slowest = [rank for rank, beat in now.items() if beat.position == last]
    return slowest if len(slowest) < len(now) else []


def explain(own: Beat, limit_seconds: float, before: Mapping[int, Beat], now: Mapping[int, Beat], ranks: int, *, gpus: bool = False) -> str:
    """One sentence: what took too long, and who is to blame as far as is known.

    With GPUs a rank's place is that of its host, which only queues work: a GPU that hangs leaves no rank behind.
    """
    overdue = f"{own.activity} has not ended within {limit_seconds:.0f} s"
    missing = [rank for rank in range(ranks) if rank not in now]
    late = behind(before, now)
    if missing and ranks > 1:
        return f"{overdue}: nothing was heard of {_ranks(missing)}"
    if not late:
        between = "a GPU, the network between them or the storage" if gpus else "the network or the storage between them"
        return f"{overdue}: all ranks are in {own.where}, so what hangs is {between}"
    silent = all(rank in before and before[rank].number == now[rank].number for rank in late)
    where = "; ".join(sorted({now[rank].where for rank in late}))
    verb = "does not answer any more" if silent else "has not finished it" if now[late[0]].activity == own.activity else "is behind"
    return f"{overdue}: {_ranks(late)} {verb}, last seen in {where}"


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))
